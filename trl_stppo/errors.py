"""The package's exceptions. Each is also the usual standard type."""


class TurnSpanError(ValueError):
    """Turn spans that are out of order, overlap, or leave the completion."""


class EnvironmentContractError(TypeError):
    """An environment whose `reset` or `step` breaks the contract."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed: incomplete, damaged, or of another kind of run."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint that could not be written; it is removed, and older ones remain."""


class RunLockError(RuntimeError):
    """An output directory of another run that is going on; it is left unchanged."""


class NonFiniteError(RuntimeError):
    """Weights are not finite, or losses and gradients were not finite too many times in a row."""


class EnvironmentFailureError(RuntimeError):
    """Environments that fail too often."""


class ThreadStartError(RuntimeError):
    """A thread that does not run, usually because of a memory limit."""


class IndexFolderError(ValueError):
    """A folder without a complete search index of the right kind and settings."""


class RetrievalError(RuntimeError):
    """A search that failed on a retrieval server."""


class TraceError(ValueError):
    """A folder without recorded episodes, or with episodes of a newer version."""


class HubError(RuntimeError):
    """A failed upload or download of the Hub; files on this disk are unchanged."""
