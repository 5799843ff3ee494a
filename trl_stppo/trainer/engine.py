"""The engine around the policy: one process, DDP, DeepSpeed's ZeRO or FSDP2.

Each class says what its engine does otherwise. In `sharding/`, `checks.py` refuses unsupported
combinations, and `critics.py` has the critic beside a sharded policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedModel

from ..models.critic import load_converted
from ._trl import prepare_deepspeed, prepare_fsdp


class Engine:
    """One process or DDP: each process has all weights and gradients, and the optimizer takes the steps.

    Attributes:
        name: "one process", "DDP", "ZeRO-0" to "ZeRO-3", "FSDP1" or "FSDP2".
        shards: whether gradients are sharded; the critic then has an optimizer of its own.
        gathers: whether all processes must join each forward pass, because it gathers weights.
        steps_in_backward: whether the policy steps in the last backward pass.
        identity: the name that a checkpoint and its resumed run share; None if the engine may change.
    """

    shards = gathers = steps_in_backward = False
    identity: str | None = None

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        self.name, self._accelerator = name, accelerator

    def num_rows(self, count: int) -> int:
        """Return the number of rows of a rollout batch, from this process's number of contexts."""
        return count

    def counts_passes(self, model: nn.Module) -> bool:
        """Return whether the number of passes must depend only on the number of rows, not on their lengths.

        DDP communicates in the last pass; if it searches for unused weights (experts without a token), it
        sees only that pass.
        """
        ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        return ddp and bool(model.find_unused_parameters or model.static_graph)

    def stepped(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the weights that steps change directly, not through float32 copies."""
        return list(weights)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the critic's autocast context."""
        return self._accelerator.autocast()

    def place(self, model: nn.Module) -> None:
        """Move a critic to the device."""
        model.to(self._accelerator.device)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a frozen model for the engine, as GRPOTrainer prepares its reference."""
        return self._accelerator.prepare_model(model, evaluation_mode=True)

    def load_adapter(self, policy: PreTrainedModel, folder: Path) -> None:
        """Load the adapter of a policy that shares its backbone with the critic."""
        # transformers before 5.23 skips the policy's adapter if subfolders hold adapters.
        policy.load_adapter(str(folder), policy.active_adapter, is_trainable=True)

    def load_skipped(self, policy: PreTrainedModel, folder: Path) -> None:
        """Load policy weights that upstream skipped because their names differ on disk."""
        load_converted(policy, folder)


class ShardedEngine(Engine):
    """Engine that reduces and shards gradients at the end of a backward pass."""

    shards = True

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        super().__init__(name, accelerator)
        self.identity = name

    def num_rows(self, count: int) -> int:
        """Return the largest number of contexts of all processes, which must make equally many passes."""
        most: int = max(gather_object([count]))
        return most

    def counts_passes(self, model: nn.Module) -> bool:
        """Return True, because the engine may communicate in every pass."""
        return True

    def load_adapter(self, policy: PreTrainedModel, folder: Path) -> None:
        """Do nothing: the engine has loaded the adapter."""

    def load_skipped(self, policy: PreTrainedModel, folder: Path) -> None:
        """Do nothing: the engine has loaded all weights."""


class DeepSpeed(ShardedEngine):
    """DeepSpeed's ZeRO, which holds the weights itself."""

    steps_in_backward = True

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        super().__init__(name, accelerator)
        self.gathers = name == "ZeRO-3"

    def stepped(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return no weights."""
        return []

    def autocast(self) -> AbstractContextManager[object]:
        """Return the critic's autocast context, because accelerate's is empty."""
        if self._accelerator.mixed_precision == "bf16":
            return torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16)
        return self._accelerator.autocast()

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a frozen model for DeepSpeed."""
        return prepare_deepspeed(model, self._accelerator)

    def load_adapter(self, policy: PreTrainedModel, folder: Path) -> None:
        """Load the adapter, as without an engine."""
        Engine.load_adapter(self, policy, folder)


class FSDP(ShardedEngine):
    """FSDP2, which gathers weights for each pass."""

    gathers = True

    def stepped(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return no weights with mixed precision."""
        return list(weights) if self._accelerator.mixed_precision == "no" else []

    def place(self, model: nn.Module) -> None:
        """Do nothing: FSDP2 moves the critic to the device shard by shard."""

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a frozen model for FSDP."""
        return prepare_fsdp(model, self._accelerator)


def engine_of(accelerator: Accelerator) -> Engine:
    """Return the engine of an accelerator."""
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if deepspeed is not None:
        return DeepSpeed(f"ZeRO-{deepspeed.zero_stage}", accelerator)
    if fsdp is not None:
        return FSDP(f"FSDP{fsdp.fsdp_version}", accelerator)
    return Engine("DDP" if accelerator.num_processes > 1 else "one process", accelerator)
