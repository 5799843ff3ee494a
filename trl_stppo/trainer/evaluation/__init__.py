"""Evaluation on held-out rows, in which each episode counts once."""
