"""Critics, PEFT adapters, memory estimates, and the small default model."""
