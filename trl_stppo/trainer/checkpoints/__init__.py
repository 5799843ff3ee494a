"""Checkpoints that are complete or not there, and runs that go on exactly."""
