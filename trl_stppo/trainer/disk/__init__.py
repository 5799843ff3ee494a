"""Folders of checkpoints on a disk, and the lock of the run that writes to them."""
