"""What upstream must find on the class: one-line delegates to the helpers that do the work."""

from __future__ import annotations

from typing import Any

import torch

from . import engines
from ._trl import GRPOTrainer
from .optimizers import Optimizers


class UpstreamHooks(GRPOTrainer):
    """GRPOTrainer that asks our helpers wherever it would do something else itself."""

    # ------------------------------------------------------------- optimizers and engines

    _optimizers: Optimizers

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Upstream's optimizer for the policy, plus one group for the critic.

        With DeepSpeed or FSDP2 the critic has an optimizer of its own.
        """
        return self._optimizers.create(super().create_optimizer, *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Upstream's; before anything is wrapped, the reference among it."""
        super().create_accelerator_and_postprocess()
        engines.keep_precision(self.accelerator)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._optimizers.preparing():
            return super()._prepare_for_training(*args, **kwargs)
