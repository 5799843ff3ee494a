"""Saving of an agent's files, and pushing to the Hub."""
