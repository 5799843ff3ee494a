"""Evaluation on held-out rows; each episode has a name and counts once."""
