"""Gradients that are kept apart, the correction that is made of them, and what steps."""
