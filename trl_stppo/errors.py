"""The package's exceptions, each derived from a standard type such as ValueError."""


class TurnSpanError(ValueError):
    """Turn spans that overlap, are out of order, or exceed the completion."""


class EnvironmentContractError(TypeError):
    """An environment whose `reset` or `step` breaks the contract."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed: incomplete, damaged, or of another kind of run."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint that could not be written. Its files are removed, and older checkpoints remain."""


class RunLockError(RuntimeError):
    """An output directory that another training is using. The directory is left unchanged."""


class NonFiniteError(RuntimeError):
    """Weights that are not finite, or too many losses or gradients in a row that are not finite."""


class EnvironmentFailureError(RuntimeError):
    """Environments that fail too often."""


class RolloutError(RuntimeError):
    """A rollout that a vLLM server or one of several processes could not play, raised on all processes."""


class TraceError(ValueError):
    """A folder without recorded episodes, or with episodes that a newer package version recorded."""


class HubError(RuntimeError):
    """A failed upload to the Hub or download from the Hub. Local files are unchanged."""


class MissingPackageError(ImportError):
    """An optional package that is not installed; the message names the pip extra (default: the package)."""

    def __init__(self, package: str, extra: str = "") -> None:
        """Build the message."""
        super().__init__(f"`{package}` is missing: pip install 'trl-stppo[{extra or package}]'.")


class UntestedTRLError(ImportError):
    """An untested version of TRL that has changed methods on which the trainers rely."""
