"""Guards of a run: skipped steps, and reasons and ways to end early."""
