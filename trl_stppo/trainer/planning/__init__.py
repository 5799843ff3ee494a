"""Decisions about a run that are made before a model is loaded."""
