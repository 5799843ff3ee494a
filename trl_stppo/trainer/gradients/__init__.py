"""Gradient buffers, the clipping-bias correction, and hooks of the optimizer step."""
