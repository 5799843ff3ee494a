"""What upstream must find on the class: one-line delegates to the helpers that do the work."""

from __future__ import annotations

from typing import Any

import torch

from . import engines
from ._trl import GRPOTrainer
from .evaluation import Evaluator
from .guards import Guards
from .optimizers import Optimizers


class UpstreamHooks(GRPOTrainer):
    """GRPOTrainer that asks our helpers wherever it would do something else itself."""

    _evaluator: Evaluator
    _guards: Guards
    _optimizers: Optimizers

    # ----------------------------------------------------------------------- evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Play the held-out rows and report what came of it; `docs/evaluation.md` lists the figures.

        Rows are played `num_generations_eval` times each, with the `eval_*` settings. The episodes
        follow from `seed`, the row and the weights, whatever the batch size and the number of
        processes, and training goes on as if nothing had happened.

        Args:
            eval_dataset: rows, or a dict of datasets by name, whose figures are then named
                `eval_<name>_...`. Default: the trainer's.
            ignore_keys: upstream's; without effect.
            metric_key_prefix: of the figures' names.

        Returns:
            The figures by name.
        """
        saving = self._guards.ending.saving()
        return self._evaluator.evaluate(
            super().evaluate, saving, eval_dataset, ignore_keys, metric_key_prefix
        )

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, on a test dataset: the figures are in its `metrics`, named `test_...`."""
        return self._evaluator.predict(super().predict, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Upstream's loader, of one entry per episode that knows its row and repetition."""
        self._set_signature_columns_if_needed()
        return self._evaluator.loader(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Upstream's loop over the batches; the figures are made at its end."""
        return self._evaluator.loop(
            super().evaluation_loop, dataloader, description, ignore_keys, metric_key_prefix
        )

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        """Play one batch; there is no loss and nothing to predict."""
        self._evaluator.play(inputs)
        return None, None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Upstream's log, whose table of completions takes the place of none of training's."""
        with self._evaluator.table_of_its_own():
            super().log(logs, start_time)

    # ------------------------------------------------------------- optimizers and engines

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
