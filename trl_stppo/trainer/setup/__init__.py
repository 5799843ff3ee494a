"""Construction of a trainer's parts: players, engines and models."""
