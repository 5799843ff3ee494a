"""What is logged and shown of a run."""
