"""Episodes of training and evaluation, written down for the trace."""
