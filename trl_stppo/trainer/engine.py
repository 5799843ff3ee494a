"""The engine around the policy: one process, DDP, DeepSpeed's ZeRO or FSDP2.

In `sharding/`, `checks.py` refuses unsupported combinations, and `critics.py` has the critic beside a sharded
policy.
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
    """Differences between engines (one process, DDP, DeepSpeed, FSDP2), for the code that depends on them.

    Attributes:
        name: "one process", "DDP", "ZeRO-0" to "ZeRO-3", "FSDP1" or "FSDP2".
        shards: whether gradients are sharded; the critic then has an optimizer of its own.
        gathers: whether all processes must join each forward pass, because it gathers weights.
        steps_in_backward: whether the policy steps in the last backward pass, as under DeepSpeed.
        identity: the name in a checkpoint, which a resumed run must share; None if any other will do.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        self.name = "DDP" if accelerator.num_processes > 1 else "one process"
        if deepspeed is not None:
            self.name = f"ZeRO-{deepspeed.zero_stage}"
        elif fsdp is not None:
            self.name = f"FSDP{fsdp.fsdp_version}"
        self._accelerator, self._is_fsdp = accelerator, fsdp is not None
        self.steps_in_backward = deepspeed is not None
        self.shards = self.steps_in_backward or self._is_fsdp
        self.gathers = self._is_fsdp or self.name == "ZeRO-3"
        self.identity = self.name if self.shards else None

    def num_rows(self, count: int) -> int:
        """Return the number of rows of a rollout batch, from this process's number of contexts.

        With sharded gradients all processes must make equally many passes.
        """
        return max(gather_object([count])) if self.shards else count

    def counts_passes(self, model: nn.Module) -> bool:
        """Return whether the number of passes must depend only on the number of rows, not on their lengths.

        An engine that shards may communicate in every pass. DDP communicates in the last pass; if it searches
        for unused weights (experts without a token), it sees only that pass.
        """
        ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        return self.shards or (ddp and bool(model.find_unused_parameters or model.static_graph))

    def stepped(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the weights that steps change directly, not through float32 copies."""
        copied = self._is_fsdp and self._accelerator.mixed_precision != "no"
        return [] if copied or self.steps_in_backward else list(weights)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the critic's autocast context."""
        # Under DeepSpeed accelerate's context is empty.
        if self.steps_in_backward and self._accelerator.mixed_precision == "bf16":
            return torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16)
        return self._accelerator.autocast()

    def place(self, model: nn.Module) -> None:
        """Move a critic to the device, unless FSDP2 moves it shard by shard."""
        if not self._is_fsdp:
            model.to(self._accelerator.device)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a frozen model for the engine, as GRPOTrainer prepares its reference."""
        if self._is_fsdp:
            return prepare_fsdp(model, self._accelerator)
        if self.steps_in_backward:
            return prepare_deepspeed(model, self._accelerator)
        return self._accelerator.prepare_model(model, evaluation_mode=True)

    def load_adapter(self, policy: PreTrainedModel, folder: Path) -> None:
        """Load the adapter of a policy that it shares with the critic, unless FSDP2 has loaded it."""
        # transformers before 5.23 skips the policy's adapter if subfolders hold adapters.
        if not self._is_fsdp:
            policy.load_adapter(str(folder), policy.active_adapter, is_trainable=True)

    def load_skipped(self, policy: PreTrainedModel, folder: Path) -> None:
        """Load policy weights that upstream skipped because their names differ on disk."""
        if not self.shards:
            load_converted(policy, folder)


def engine_of(accelerator: Accelerator) -> Engine:
    """Return the engine of an accelerator."""
    return Engine(accelerator)
