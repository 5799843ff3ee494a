"""Pushing to the Hub: the part of `PPOTrainer` that wraps upstream's uploads and model card.

What lands there loads by plain `AutoModelForCausalLM` or `PeftModel`: the policy at the root, the
critic in a folder of its own, `agent.json` with what one needs to play. See `docs/hub.md`.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..hub import card, pushing
from ..hub.settings import AGENT_FILE, CRITIC_FOLDER
from ..models.adapters import discard_saved_reference
from . import agent_files, checkpoint_files
from ._trl import uploads_without
from .checkpointing import ActorCriticCheckpoints

logger = logging.getLogger(__name__)


class CompletePushCallback(TrainerCallback):
    """Puts beside the policy what upstream leaves in the checkpoint when it pushes from one.

    Upstream calls it once it is sure to push, and has copied nothing yet.

    Attributes:
        checkpoint: that is being pushed; None in a push of the whole output directory.
    """

    def __init__(self) -> None:
        self.checkpoint: Path | None = None

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy the critic and the agent's settings."""
        if self.checkpoint is None:
            return
        run_dir = Path(args.output_dir)
        shutil.copyfile(self.checkpoint / AGENT_FILE, run_dir / AGENT_FILE)
        if (self.checkpoint / CRITIC_FOLDER).is_dir():
            shutil.copytree(
                self.checkpoint / CRITIC_FOLDER, run_dir / CRITIC_FOLDER, dirs_exist_ok=True
            )


class AgentPublishing(ActorCriticCheckpoints):
    """GRPOTrainer whose repositories hold a whole agent, and whose failed pushes lose nothing."""

    _name: str
    _paper: dict[str, str]
    has_critic: bool

    def _init_publishing(self) -> None:
        self._complete_push = CompletePushCallback()
        self.add_callback(self._complete_push)
        self._saved_for_push = True
        self._pushed_from: dict[Any, Path] = {}

    # ------------------------------------------------------------------------- files

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir or self.args.output_dir)
        with card.kept(folder):
            super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        agent_files.agent_settings(self).save(folder)
        if self._staging is None:  # only a checkpoint is gone on from with the same reference
            discard_saved_reference(folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, its tokenizer, its critic, the settings to play it with, and a model card.

        Args:
            output_dir: default `args.output_dir`.
        """
        own = output_dir is None or Path(output_dir) == Path(self.args.output_dir)
        if own:
            self._finish_current_push()  # which reads the files that are about to be written
        super().save_model(output_dir, _internal_call)
        self._saved_for_push = True
        if own and not _internal_call and not self.args.push_to_hub:
            self.create_model_card()

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
        folder = Path(self.args.output_dir)
        if not card.may_be_written(folder):
            self._warn_of_foreign_card(folder / card.CARD)
            return
        names = agent_files.card_names(self, model_name, dataset_name)
        super().create_model_card(*names, tags=tags)
        if not self.is_world_process_zero():
            return
        try:
            agent_files.improve_card(self, *names, draw=self._draws_card())
        except Exception as error:  # no card is worth a run; TRL's is there
            logger.warning(
                "The model card is TRL's alone: %s: %s", type(error).__name__, error, exc_info=True
            )

    def _warn_of_foreign_card(self, path: Path) -> None:
        if self._foreign_card_named or not self.is_world_process_zero():
            return
        self._foreign_card_named = True
        logger.warning(
            "`%s` was not written by a trainer (it has no tag %s) and is left as it is; it stands for the "
            "model card in a push. To get the run's card, move it away. This is said once.",
            path, card.GENERATED,
        )  # fmt: skip

    _foreign_card_named = False

    def _draws_card(self) -> bool:
        """Whether curves are due: not at each checkpoint that stays here, nor under a running upload."""
        job = getattr(self, "push_in_progress", None)
        if job is not None and not job.is_done():
            return False
        return not self._saving_checkpoint or self.args.push_to_hub

    _saving_checkpoint = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_checkpoint = False

    # ----------------------------------------------------------------------- uploads

    def init_hf_repo(self, token: str | None = None, **kwargs: Any) -> None:
        """Upstream's: make the repository, where it is not there yet.

        Args:
            token: of the Hub.
            **kwargs: `private`, from transformers 5.23 on.

        Raises:
            HubError: it can be neither made nor reached.
        """
        try:
            super().init_hf_repo(token, **kwargs)
        except Exception as error:
            raise pushing.failed_creation(error, self._repo_name()) from error

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model and upload it, with critic, settings and card, as upstream does.

        Args:
            *args: as `transformers.Trainer.push_to_hub` takes them.
            **kwargs: likewise; further ones are of `create_model_card`.

        Raises:
            HubError: the Hub has not taken it. Everything lies in the output directory then.
        """
        self._saved_for_push = False
        try:
            with uploads_without(pushing.LEFT_OUT_TOO):
                result = super().push_to_hub(*args, **kwargs)
        except Exception as error:
            folder = Path(self.args.output_dir)
            if not self._saved_for_push:  # the repository could not be made, so nothing was written
                self.save_model(_internal_call=True)
                self.create_model_card()
            revision = kwargs.get("revision") or self.args.hub_revision
            raise pushing.failed_push(error, self._repo_name(), folder, revision) from error
        if hasattr(result, "add_done_callback"):  # not blocking
            pushing.watch(result, self._warn_of(Path(self.args.output_dir)))
        return result

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upstream's, of the whole agent; a failure is told and does not end the run."""
        if self._staging is not None:
            return super()._push_from_checkpoint(checkpoint_folder)
        folder = Path(checkpoint_folder)
        before = list(self._push_jobs())
        self._complete_push.checkpoint = folder
        try:
            with uploads_without(pushing.LEFT_OUT_TOO):
                super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:
            pushing.warn_of_failed_push(error, self._repo_name(), folder)
        finally:
            self._complete_push.checkpoint = None
        for job in self._push_jobs():
            if job not in before:
                self._pushed_from[job] = folder
                pushing.watch(job, self._warn_of(folder))

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> Path | None:
        """A checkpoint that was downloaded into the output directory gets the name it had there.

        There upstream looks for the best one.
        """
        folder = super()._checkpoint_to_resume(wanted)
        run_dir = Path(self.args.output_dir).resolve()
        if folder is None or folder.resolve() != run_dir / checkpoint_files.LAST_CHECKPOINT:
            return folder
        named = run_dir / f"checkpoint-{checkpoint_files.read_manifest(folder)['global_step']}"
        if checkpoint_files.complaint(named) is None:
            checkpoint_files.check_one_run(folder, named)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and not named.exists():
            with suppress(FileNotFoundError):  # on a shared disk another machine was faster
                os.replace(folder, named)
        self.accelerator.wait_for_everyone()
        return named if checkpoint_files.complaint(named) is None else folder

    def _push_jobs(self) -> list[Any]:
        progress = getattr(self, "push_in_progress", None)
        return [] if progress is None else progress.jobs

    def _kept_checkpoints(self) -> set[Path]:
        """Checkpoints that are being uploaded."""
        return {folder for job, folder in self._pushed_from.items() if not job.done()}

    def _warn_of(self, folder: Path) -> Any:
        name = self._repo_name()
        return lambda error: pushing.warn_of_failed_push(error, name, folder)

    def _repo_name(self) -> str:
        named = getattr(self, "hub_model_id", None) or self.args.hub_model_id
        return named or Path(self.args.output_dir).absolute().name

    def _finalize_training(self, *args: Any) -> Any:
        """Upstream's, which waits for uploads; what they have kept of old checkpoints goes then."""
        result = super()._finalize_training(*args)
        if self._pushed_from and self.args.should_save:
            run_dir, best = Path(self.args.output_dir), self.state.best_model_checkpoint
            checkpoint_files.prune(run_dir, self.args.save_total_limit, best)
        return result
