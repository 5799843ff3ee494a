"""Guards of a run, which skip bad optimizer steps or end the run early."""
