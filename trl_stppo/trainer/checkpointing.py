"""Saving and resuming: the part of `PPOTrainer` that wraps upstream's checkpoints."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..errors import CheckpointError, CheckpointWriteError
from ..hub.settings import CRITIC_FOLDER
from ..models.critic import SharedCritic
from . import checkpoint_files, disk, new_settings, run_state
from ._trl import close_other_trackio
from .processes import done_by
from .reporting import named_run
from .run_lock import RunLock
from .update_phase import ActorCriticUpdate

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)
CRITIC_OPTIMIZER = "critic_optimizer.pt"
REFERENCE = "reference.pt"
STALE_POLICIES = "stale_policies.pt"


class RunStateCallback(TrainerCallback):
    """Puts the run's state back once upstream has set up its own, and watches the place in the rows.

    Attributes:
        saved: this process's state in the checkpoint that the run goes on from, until it is put back.
    """

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self.saved: dict[str, Any] | None = None
        self._episodes: dict[str, Any] = {}
        self._epoch_start: Tensor | None = None
        self._passes = self._pass_start = self._began_at = 0
        self._continues = False

    def read(self, folder: Path | None) -> None:
        """Take in the checkpoint's state; None for a run that starts."""
        self.saved, self._passes, self._pass_start = None, 0, 0
        self._continues = folder is not None
        if folder is None:
            return
        process = self._trainer.accelerator.process_index
        if not run_state.state_file(folder, process).is_file():
            process = 0  # fewer processes wrote it, at the end of a rollout batch
        self.saved = run_state.loaded(run_state.state_file(folder, process))
        self._episodes = run_state.load_episodes(folder, process)
        self._passes, self._pass_start = self.saved["passes"] - 1, self.saved["pass_start"]

    def place_in_stream(self) -> tuple[int, int]:
        """Passes over a stream that are over, and batches of the present one that are used."""
        updates = self._trainer.state.global_step - self._pass_start
        return self._passes, updates * self._trainer.args.gradient_accumulation_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start over, or go on from the checkpoint."""
        trainer, saved, folder = self._trainer, self.saved, self._trainer._resume_folder
        if saved is None or folder is None:
            trainer._step, trainer._buffered_inputs = 0, None
            trainer._stale.load_state_dict([])
            return
        if state.global_step >= state.max_steps and trainer.accelerator.is_main_process:
            logger.warning(
                "%s is of step %s, and this run ends with step %s: there is nothing left to train. To train "
                "on, raise total_episodes (or max_steps, num_train_epochs); for a new run, choose another "
                "output_dir.",
                folder, state.global_step, state.max_steps,
            )  # fmt: skip
        run_state.restore(trainer, saved)
        run_state.restore_episodes(trainer, self._episodes)
        if trainer._optimizers.critic is not None:
            trainer._optimizers.critic.load_state_dict(run_state.loaded(folder / CRITIC_OPTIMIZER))
        if (folder / STALE_POLICIES).is_file():
            trainer._stale.load_state_dict(run_state.loaded(folder / STALE_POLICIES))
        if trainer.is_deepspeed_enabled:  # which loads the policy itself
            trainer._load_beside_policy(folder)
        if trainer._train_generator is not None and saved["sampler"] is not None:
            trainer._train_generator.set_state(saved["sampler"])
        new_settings.renew(trainer, folder, checkpoint_files.read_manifest(folder)["settings"])
        self.saved, self._episodes = None, {}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the sampler's state from before it draws the epoch's order."""
        generator = self._trainer._train_generator
        self._epoch_start = None if generator is None else generator.get_state()
        self._passes += 1
        self._began_at = state.global_step
        if not self._continues:
            self._pass_start = state.global_step
        self._continues = False

    def place(self) -> dict[str, Any]:
        """Where in the rows the run is, for `run_state.collect`."""
        generator, epoch = self._trainer._train_generator, self._trainer.state.epoch or 0.0
        sampler = self._epoch_start
        ended = epoch == int(epoch) and self._began_at != self._trainer.state.global_step
        if generator is not None and ended:  # the next epoch draws from here
            sampler = generator.get_state()
        return {"sampler": sampler, "passes": self._passes, "pass_start": self._pass_start}


class ActorCriticCheckpoints(ActorCriticUpdate):
    """GRPOTrainer whose checkpoints hold all of a run and are written in one piece."""

    def _init_checkpoints(self) -> None:
        self._staging: Path | None = None
        self._resume_folder: Path | None = None
        self._last_checkpoint: Path | None = None  # that this run has written or come from
        self._run_name = uuid.uuid4().hex  # the same for all that goes on from one start
        self._has_trained = False
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
        with self._alone_in_output_dir():
            folder = None
            if checkpoint_files.as_meant(resume_from_checkpoint):
                folder = self._checkpoint_to_resume(resume_from_checkpoint)
            if folder is not None:
                saved = checkpoint_files.read_manifest(folder)
                run_state.check_same_run(folder, saved, run_state.about(self))
                self._run_name = saved.get("run") or self._run_name
            else:
                self._begin_run(resume_from_checkpoint)
            self._has_trained = True
            self._resume_folder = self._last_checkpoint = folder
            self._run_state.read(folder)
            with named_run(self.args, self._run_name):
                close_other_trackio(self)
                output = super().train(None if folder is None else str(folder), *args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    @contextmanager
    def _alone_in_output_dir(self) -> Iterator[None]:
        """One process holds the lock for all of the run."""
        self._lock = RunLock(Path(self.args.output_dir))
        try:
            done_by(self.accelerator.is_main_process, self._lock.take)
            yield
        finally:
            self._lock.release()

    def _begin_run(self, wanted: str | bool | None) -> None:
        """A name for a run that starts, and a warning where it does so on top of another one."""
        if self._has_trained:  # and what it has left there is no news to anybody
            self._run_name = uuid.uuid4().hex
        elif self.accelerator.is_main_process and wanted != "auto":  # which has looked already
            checkpoint_files.warn_of_earlier_run(Path(self.args.output_dir))

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> Path | None:
        """Looked for, and read whole, once on each machine."""
        run_dir = Path(self.args.output_dir)

        def look() -> Path | None:
            checkpoint_files.tidy(run_dir)
            return checkpoint_files.to_resume(run_dir, wanted, thorough=True)

        found = set(done_by(self.accelerator.is_local_main_process, look))
        if len(found) > 1:
            raise CheckpointError(
                f"`resume_from_checkpoint={wanted!r}` is not the same on all machines: "
                f"{', '.join(sorted(map(str, found)))}. Pass the path of one that all of them hold."
            )
        return found.pop()

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_train_epochs: int, *args: Any
    ) -> tuple[int, int]:
        where = super()._init_training_state(max_steps, steps_per_epoch, num_train_epochs, *args)
        self._find_best_checkpoint(Path(self.args.output_dir))
        if self.state.global_step >= max_steps:  # upstream would take one step more than there are
            return num_train_epochs, 0
        streams = not hasattr(self.train_dataset, "__len__")
        if self._resume_folder is None or not streams or self.args.ignore_data_skip:
            return where
        return self._run_state.place_in_stream()  # upstream takes a stream for one endless pass

    def _find_best_checkpoint(self, run_dir: Path) -> None:
        """Its path, wherever the run's folder is now."""
        best = self.state.best_global_step
        path = run_dir / f"checkpoint-{best}"
        if best and (best == self.state.global_step or path.is_dir()):
            self.state.best_model_checkpoint = str(path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        policy = self.model if model is None else model
        if isinstance(self.critic, SharedCritic) and not self.is_fsdp_enabled:
            # transformers before 5.23 loads the adapters in subfolders only, once it finds one there.
            policy.load_adapter(str(folder), policy.active_adapter, is_trainable=True)
        self._load_beside_policy(folder)

    def _load_beside_policy(self, folder: Path) -> None:
        self.critic.load(folder / CRITIC_FOLDER)
        reference = folder / REFERENCE
        if self.args.sync_ref_model and reference.is_file():
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(
                run_state.loaded(reference)
            )

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
        self._guards.ending.check_weights()
        run_dir = Path(self._get_output_dir(trial))
        staging, name = run_dir / checkpoint_files.STAGING, f"checkpoint-{self.state.global_step}"
        final = run_dir / name
        done_by(self.accelerator.is_main_process, self._lock.check)
        if self.accelerator.is_local_main_process:
            disk.remove(staging)
        self.accelerator.wait_for_everyone()
        try:
            self._staging = staging
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            self._find_best_checkpoint(run_dir)
            self._save_run_state(staging / name)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                order = checkpoint_files.next_order(run_dir)
                checkpoint_files.seal(staging / name, {**run_state.about(self), "order": order})
        except Exception as error:
            raise self._failed(error, run_dir, staging) from error
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and (staging / name).is_dir():
            checkpoint_files.publish(staging / name, final)
        self._last_checkpoint = final
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            limit, kept = self.args.save_total_limit, {final, *self._kept_checkpoints()}
            checkpoint_files.prune(run_dir, limit, best, kept)

    def _kept_checkpoints(self) -> set[Path]:
        """Checkpoints that are not to be deleted yet."""
        return set()

    def _push_from_checkpoint(self, output_dir: str) -> None:
        if self._staging is None:  # else it is uploaded under its final name
            super()._push_from_checkpoint(output_dir)

    def _finalize_training(self, *args: Any) -> Any:
        """Upstream's, but for its deleting all checkpoints beside the best where one is to be kept.

        That would be the one from which a run that ended early is to go on.
        """
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            result = super()._finalize_training(*args)
        finally:
            self.args.save_total_limit = limit
        best = self.state.best_model_checkpoint
        if (
            limit == 1
            and best is not None
            and self.args.should_save
            and not self._guards.ending.reason
        ):
            for folder in checkpoint_files.checkpoints(Path(best).parent):
                if folder.resolve() != Path(best).resolve():
                    checkpoint_files.discard(folder)
        return result

    def _save_run_state(self, folder: Path) -> None:
        """What upstream leaves out: each process writes its own part."""
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
        if self.args.save_only_model:
            return
        folder.mkdir(parents=True, exist_ok=True)
        process = self.accelerator.process_index
        state = run_state.collect(self, self._run_state.place())
        torch.save(state, run_state.state_file(folder, process))
        torch.save(run_state.collect_episodes(self), run_state.episodes_file(folder, process))
        if self.args.should_save and self._optimizers.critic is not None:
            torch.save(self._optimizers.critic.state_dict(), folder / CRITIC_OPTIMIZER)
        if self.args.should_save and self.args.rollout_staleness:
            torch.save(self._stale.state_dict(), folder / STALE_POLICIES)
        if self.args.should_save and self.args.sync_ref_model and self.ref_model is not None:
            reference = self.accelerator.unwrap_model(self.ref_model)
            torch.save(reference.state_dict(), folder / REFERENCE)

    def _failed(self, error: Exception, run_dir: Path, staging: Path) -> CheckpointWriteError:
        """Clear the half-written folder away, which also frees its space, and say what is left."""
        why, remedy = disk.refusal(error, run_dir, staging)
        disk.remove(staging)
        left = "Nothing half-written is left"
        if staging.exists():
            left = f"What is half-written lies in `{staging}`, and is no checkpoint"
        found = checkpoint_files.checkpoints(run_dir)
        whole = [folder for folder in found if checkpoint_files.complaint(folder) is None]
        return CheckpointWriteError(
            f"The checkpoint of step {self.state.global_step} could not be written to `{run_dir}`: "
            f"{why}. {left}; the newest complete checkpoint is {whole[-1] if whole else 'none'}. "
            f"{remedy} and go on with resume_from_checkpoint=True."
        )
