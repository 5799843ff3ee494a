"""Gradient buffers, and the measurement and correction of the clipping bias."""
