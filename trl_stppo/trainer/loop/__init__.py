"""Parts of the training loop (`training_loop.py`)."""
