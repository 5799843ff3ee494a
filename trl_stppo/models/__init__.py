"""Critics, PEFT adapters, and the small default model."""
