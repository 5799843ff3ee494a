"""Critics, and the small default model."""
