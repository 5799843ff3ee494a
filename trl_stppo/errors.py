"""The package's own exceptions. Each is also the standard type a caller would catch anyway."""


class TurnSpanError(ValueError):
    """Turn spans that are out of order, overlap, or leave the completion."""


class EnvironmentContractError(TypeError):
    """An environment whose `reset` or `step` does not keep the contract the rollout relies on."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from: incomplete, damaged, or of another kind of run."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint that could not be written; nothing half-written is left, older ones remain."""


class RunLockError(RuntimeError):
    """An output directory that belongs to another run, which goes on; nothing there is changed."""


class NonFiniteError(RuntimeError):
    """Weights that are not finite, or losses and gradients, too often in a row to go on."""


class EnvironmentFailureError(RuntimeError):
    """Environments that fail so often that nothing can be learned from them."""


class ThreadStartError(RuntimeError):
    """A thread that does not run, in most cases because memory is limited."""


class IndexFolderError(ValueError):
    """A folder that holds no complete search index, or one of another kind or other settings."""


class RetrievalError(RuntimeError):
    """A search that a retrieval server did not answer, or refused."""


class TraceError(ValueError):
    """A folder without recorded episodes, or with some that this version cannot read."""


class HubError(RuntimeError):
    """Something that the Hub did not take or give; what lies on this disk is untouched."""
