"""Recording of training and evaluation episodes for the trace."""
