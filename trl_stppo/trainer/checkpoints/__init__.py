"""Checkpoints that are complete or absent, and exact resumption of runs."""
