"""The package's own exceptions. Each is also the standard type a caller would catch anyway."""


class TurnSpanError(ValueError):
    """Turn spans that are out of order, overlap, or leave the completion."""


class EnvironmentContractError(TypeError):
    """An environment whose `reset` or `step` does not keep the contract the rollout relies on."""
