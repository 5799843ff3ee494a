"""Held-out rows: played by name, counted once."""
