"""Metrics and displays of a run."""
