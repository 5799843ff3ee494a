"""Writing of complete checkpoints, and exact resumption of runs."""
