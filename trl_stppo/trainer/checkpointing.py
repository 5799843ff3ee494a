"""Saving and resuming: the part of `PPOTrainer` that wraps upstream's checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..errors import CheckpointError, CheckpointWriteError
from ..models.critic import CRITIC_FOLDER
from . import checkpoint_files, run_state
from .engines import CriticOptimizer
from .update_phase import ActorCriticUpdate

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

CRITIC_OPTIMIZER = "critic_optimizer.pt"
REFERENCE = "reference.pt"


class RunStateCallback(TrainerCallback):
    """Puts the run's state back once upstream has set up its own, and watches the sampler."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self._epoch_start: Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start over, or go on from the checkpoint."""
        trainer = self._trainer
        folder = trainer._resume_folder
        if folder is None:
            trainer._step, trainer._buffered_inputs = 0, None
            return
        path = run_state.state_file(folder, trainer.accelerator.process_index)
        if not path.is_file():  # fewer processes wrote it, at the end of a rollout batch
            path = run_state.state_file(folder, 0)
        saved = torch.load(path, map_location="cpu", weights_only=True)
        run_state.restore(trainer, saved)
        if trainer._critic_optimizer is not None:
            moments = torch.load(folder / CRITIC_OPTIMIZER, map_location="cpu", weights_only=True)
            trainer._critic_optimizer.load_state_dict(moments)
        if trainer.is_deepspeed_enabled:  # which loads the policy itself
            trainer._load_beside_policy(folder)
        if trainer._train_generator is not None and saved["sampler"] is not None:
            trainer._train_generator.set_state(saved["sampler"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the sampler's state from before it draws the epoch's order."""
        generator = self._trainer._train_generator
        self._epoch_start = None if generator is None else generator.get_state()

    def sampler_state(self) -> Tensor | None:
        """The state from which a resumed run draws the order of the epoch it is in."""
        generator, epoch = self._trainer._train_generator, self._trainer.state.epoch or 0.0
        if generator is None:
            return None
        return generator.get_state() if epoch == int(epoch) else self._epoch_start


class ActorCriticCheckpoints(ActorCriticUpdate):
    """GRPOTrainer whose checkpoints hold all of a run and are written in one piece."""

    _critic_optimizer: CriticOptimizer | None

    def _init_checkpoints(self) -> None:
        self._staging: Path | None = None
        self._resume_folder: Path | None = None
        self._run_state = RunStateCallback(self)
        self.add_callback(self._run_state)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        self._train_generator = getattr(sampler, "generator", None)
        return sampler

    _train_generator: torch.Generator | None = None

    # --------------------------------------------------------------------- resuming

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the start or exactly from where a checkpoint was written.

        Args:
            resume_from_checkpoint: folder of a checkpoint; True for the newest complete one in
                `output_dir`; "auto" for the same, or a new run where there is none.
            *args: as `transformers.Trainer.train` takes them.
            **kwargs: likewise.

        Returns:
            Upstream's `TrainOutput`; its training loss is that of the whole run, resumed or not.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, or of another kind of run; nothing
                has been changed then.
        """
        folder = None
        if resume_from_checkpoint:
            folder = self._checkpoint_to_resume(resume_from_checkpoint)
        if folder is not None:
            saved = checkpoint_files.read_manifest(folder)
            run_state.check_same_run(folder, saved, run_state.about(self))
        self._resume_folder = folder
        output = super().train(None if folder is None else str(folder), *args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def _checkpoint_to_resume(self, wanted: str | bool) -> Path | None:
        run_dir = Path(self.args.output_dir)
        if self.accelerator.is_local_main_process:
            checkpoint_files.tidy(run_dir)
        self.accelerator.wait_for_everyone()
        if wanted == "auto" and not checkpoint_files.checkpoints(run_dir):
            return None
        if isinstance(wanted, bool) or wanted == "auto":
            return checkpoint_files.last_complete(run_dir)
        problem = checkpoint_files.complaint(Path(wanted))
        if problem is not None:
            raise CheckpointError(problem)
        return Path(wanted)

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_train_epochs: int, *args: Any
    ) -> tuple[int, int]:
        where = super()._init_training_state(max_steps, steps_per_epoch, num_train_epochs, *args)
        # Upstream would take one step more than there are, from a run's last checkpoint.
        return where if self.state.global_step < max_steps else (num_train_epochs, 0)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_beside_policy(Path(resume_from_checkpoint))

    def _load_beside_policy(self, folder: Path) -> None:
        self.critic.load(folder / CRITIC_FOLDER)
        reference = folder / REFERENCE
        if self.args.sync_ref_model and reference.is_file():
            weights = torch.load(reference, map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(weights)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.critic.load(Path(self.state.best_model_checkpoint) / CRITIC_FOLDER)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Upstream's log, except that the last one divides the whole run's loss by all its steps."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    # ----------------------------------------------------------------------- saving

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.critic.save(Path(output_dir or self.args.output_dir) / CRITIC_FOLDER)

    def _get_output_dir(self, trial: Any = None) -> str:
        run_dir: str = super()._get_output_dir(trial)
        return run_dir if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Upstream's checkpoint with the run's state, complete under its name or not there at all."""
        run_dir = Path(self._get_output_dir(trial))
        staging, name = run_dir / checkpoint_files.STAGING, f"checkpoint-{self.state.global_step}"
        final = run_dir / name
        if self.accelerator.is_local_main_process:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            with self._saving_into(staging):
                super()._save_checkpoint(model, trial)
            self._save_run_state(staging / name, final)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoint_files.seal(staging / name, run_state.about(self))
        except Exception as error:
            raise self._failed(error, run_dir, staging) from error
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and (staging / name).is_dir():
            checkpoint_files.publish(staging / name, final)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            checkpoint_files.prune(run_dir, self.args.save_total_limit, best)

    @contextmanager
    def _saving_into(self, staging: Path) -> Iterator[None]:
        """Let upstream write elsewhere, and neither upload nor delete: that comes after the rename."""
        args = self.args
        kept = args.push_to_hub, args.save_total_limit
        self._staging, args.push_to_hub, args.save_total_limit = staging, False, None
        try:
            yield
        finally:
            self._staging = None
            args.push_to_hub, args.save_total_limit = kept

    def _save_run_state(self, folder: Path, final: Path) -> None:
        """What upstream leaves out: each process writes its own part."""
        if self.state.best_model_checkpoint == str(folder):
            self.state.best_model_checkpoint = str(final)
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
        if self.args.save_only_model:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state = run_state.collect(self, self._run_state.sampler_state())
        torch.save(state, run_state.state_file(folder, self.accelerator.process_index))
        if self.args.should_save and self._critic_optimizer is not None:
            torch.save(self._critic_optimizer.state_dict(), folder / CRITIC_OPTIMIZER)
        if self.args.should_save and self.args.sync_ref_model and self.ref_model is not None:
            reference = self.accelerator.unwrap_model(self.ref_model)
            torch.save(reference.state_dict(), folder / REFERENCE)

    def _failed(self, error: Exception, run_dir: Path, staging: Path) -> CheckpointWriteError:
        """Clear the half-written folder away, which also frees its space, and say what is left."""
        shutil.rmtree(staging, ignore_errors=True)
        older = checkpoint_files.checkpoints(run_dir)
        free = shutil.disk_usage(run_dir).free / 2**30
        return CheckpointWriteError(
            f"The checkpoint of step {self.state.global_step} could not be written to `{run_dir}`: "
            f"{type(error).__name__}: {error}. {free:.2f} GiB are free there. Nothing half-written is "
            f"left; the newest complete checkpoint is {older[-1] if older else 'none'}. Make room (or "
            f"set save_total_limit) and go on with resume_from_checkpoint=True."
        )
