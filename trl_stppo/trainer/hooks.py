"""What upstream must find on the class, and users too: delegates to the helpers that do the work."""

from __future__ import annotations

from typing import Any

import torch

from . import engines, publishing
from ._trl import GRPOTrainer
from .checkpointing import Checkpoints
from .evaluation import Evaluator
from .guards import Guards
from .optimizers import Optimizers
from .publishing import Publisher
from .run_state import RunState


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
        """Upstream's log, with the whole run's loss, and a table of completions for each evaluation."""
        with self._evaluator.table_of_its_own():
            super().log(self._run_state.of_whole_run(logs), start_time)

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

    # ------------------------------------------------- a run, and the checkpoints that it leaves

    _run_state: RunState
    _checkpoints: Checkpoints
    _publisher: Publisher

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the start or exactly from where a checkpoint was written.

        Args:
            resume_from_checkpoint: folder of a checkpoint; True for the newest complete one in
                `output_dir`; "auto" for the same, or a new run where none has been written.
            *args: as `transformers.Trainer.train` takes them.
            **kwargs: likewise.

        Returns:
            Upstream's `TrainOutput`; its training loss is that of the whole run, resumed or not.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, or of another kind of run; nothing
                has been changed then.
            RunLockError: another run is writing to `output_dir`; nothing has been changed either.
        """
        return self._checkpoints.train(super().train, resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Upstream's, whose place in the rows a checkpoint keeps."""
        return self._run_state.notice(super()._get_train_sampler(dataset))

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Upstream's, with the place in the rows that it does not know itself."""
        return self._checkpoints.begin(super()._init_training_state, *args)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Upstream's, and what stands beside the policy."""
        self._checkpoints.load(super()._load_from_checkpoint, resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Upstream's, and its critic."""
        self._checkpoints.load_best(super()._load_best_model)

    def _get_output_dir(self, trial: Any = None) -> str:
        """Upstream's, but the staging folder while a checkpoint is being written."""
        return self._checkpoints.output_dir(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Upstream's with the run's state, complete under its name or not there at all."""
        self._publisher.save_checkpoint(super()._save_checkpoint, model, trial)

    def _finalize_training(self, *args: Any) -> Any:
        """Upstream's, but for what it would delete."""
        return self._publisher.finish(super()._finalize_training, *args)

    # ------------------------------------------------------------------ an agent, and the Hub

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Upstream's files of the policy, with those of a whole agent."""
        self._publisher.save(super()._save, output_dir, state_dict)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, its tokenizer, its critic, the settings to play it with, and a model card.

        Args:
            output_dir: default `args.output_dir`.
        """
        self._publisher.save_model(super().save_model, output_dir, _internal_call)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card, `README.md` in the output directory: TRL's, and what is the agent's.

        A README.md that no trainer has written stays as it is; a push uploads it.

        Args:
            model_name: its title; default the name of the repository or of the output directory.
            dataset_name: id on the Hub of the data; default what the training rows come from.
            tags: besides those of the trainer.
        """
        self._publisher.write_card(super().create_model_card, model_name, dataset_name, tags)

    def init_hf_repo(self, token: str | None = None, **kwargs: Any) -> None:
        """Upstream's: make the repository, where it is not there yet.

        Args:
            token: of the Hub.
            **kwargs: `private`, from transformers 5.23 on.

        Raises:
            HubError: it can be neither made nor reached.
        """
        publishing.make_repository(super().init_hf_repo, self, token, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model and upload it, with critic, settings and card, as upstream does.

        Args:
            *args: as `transformers.Trainer.push_to_hub` takes them.
            **kwargs: likewise; further ones are of `create_model_card`.

        Raises:
            HubError: the Hub has not taken it. Everything lies in the output directory then.
        """
        return self._publisher.push(super().push_to_hub, *args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upstream's, of the whole agent; a failure is told and does not end the run."""
        self._publisher.push_from_checkpoint(super()._push_from_checkpoint, checkpoint_folder)
