"""Saves and pushes an agent, and wraps upstream's methods for uploads and the model card."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback

from ..generation.sampling import SamplingSettings
from ..hub import pushing
from ..hub.settings import AGENT_FILE, CRITIC_FOLDER, AgentSettings
from ..models.adapters import discard_saved_reference
from ..rollout.episode import Limits
from ..rollout.reward_funcs import name_of
from ._trl import replaced, uploads_without
from .bridge import Bridge, Wrapped
from .checkpoints.checkpoints import Checkpoints
from .describe import algorithm_settings, dataset_of
from .planning.plan import RolloutPlan
from .sharding.critics import gathered

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def repo_name(host: Bridge) -> str:
    """Return the trainer's repository name, also before upstream's constructor is done."""
    named = getattr(host, "hub_model_id", None) or host.args.hub_model_id
    return named or Path(host.args.output_dir).absolute().name


class Publisher(TrainerCallback):
    """Saves one trainer's agent and pushes it to the Hub; a failed push loses no data.

    Methods with a `wrapped` argument wrap upstream's method of the same purpose; its arguments follow.
    """

    def __init__(
        self, host: Bridge, checkpoints: Checkpoints, rollout: RolloutPlan, limits: Limits
    ) -> None:
        self._host, self._checkpoints = host, checkpoints
        self._rollout, self._limits = rollout, limits
        self._saved_for_push = True
        self._pushing: Path | None = None
        self._foreign_card_named = False
        self._pushed_from: dict[Any, Path] = {}
        host.add_callback(self)

    @property
    def _run_dir(self) -> Path:
        return Path(self._host.args.output_dir)

    def save(self, wrapped: Wrapped, output_dir: str | None, state_dict: Any) -> None:
        """Save the policy's files by upstream's method, and the critic and `agent.json`."""
        folder = Path(output_dir or self._run_dir)
        # PEFT would write its own card, or remove the tags from the run's card.
        with replaced(PeftModel, create_or_update_model_card=lambda *_: None):
            wrapped(output_dir, state_dict)
            if not self._host.args.should_save:
                return
            self._host.critic.save(folder / CRITIC_FOLDER)
        self._agent_settings().save(folder)
        # Only checkpoints need the reference adapter, because a resumed run loads it.
        if self._checkpoints.staging is None:
            discard_saved_reference(folder)

    def save_model(self, wrapped: Wrapped, output_dir: str | None, internal: bool) -> None:
        """Implement `AgentTrainer.save_model`: finish an upload in progress, then save all files."""
        own = output_dir is None or Path(output_dir) == self._run_dir
        if own:
            # The upload in progress reads the files that are overwritten below.
            self._host.finish_push()
        with gathered(self._host.critic, saves=self._host.args.should_save):
            wrapped(output_dir, internal)
        self._saved_for_push = True
        if own and not internal and not self._host.args.push_to_hub:
            self._host.create_model_card()

    def write_card(
        self,
        wrapped: Wrapped,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Implement `AgentTrainer.create_model_card`: write TRL's card, and add results and settings."""
        host, path = self._host, self._run_dir / pushing.CARD
        if not host.is_world_process_zero():
            return
        if not pushing.may_be_written(path):
            if not self._foreign_card_named:
                logger.warning(
                    "`%s` has no tag %s, so it is left as it is, and a push takes it for the model card.",
                    path, pushing.GENERATED,
                )  # fmt: skip
            self._foreign_card_named = True
            return
        # Drop local paths, because a path can have the form of a Hub id.
        known = filter(None, (dataset_name, dataset_of(host.train_dataset)))
        on_the_hub = (n for n in known if _HUB_ID.fullmatch(n) and not Path(n).exists())
        wrapped(model_name or Path(repo_name(host)).name, next(on_the_hub, None), tags)
        names = (*pushing.SETTINGS, *(pushing.OF_CRITIC if host.has_critic else ()))
        settings = {name: algorithm_settings(host.args).get(name) for name in names}
        repo = host.hub_model_id or str(self._run_dir)
        pushing.add_run(path, repo, settings, host.state.log_history)

    def push(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Implement `AgentTrainer.push_to_hub`: push by upstream's method, and save all files if it fails."""
        self._saved_for_push = False
        try:
            with uploads_without(pushing.LEFT_OUT_TOO):
                result = wrapped(*args, **kwargs)
        except Exception as error:
            folder = self._run_dir
            # If the repository was not created, upstream has saved nothing yet.
            if not self._saved_for_push:
                self._host.save_model(_internal_call=True)
                self._host.create_model_card()
            revision = kwargs.get("revision") or self._host.args.hub_revision
            raise pushing.failed_push(error, repo_name(self._host), folder, revision) from error
        if hasattr(result, "add_done_callback"):
            pushing.watch(result, repo_name(self._host), self._run_dir)
        return result

    def save_checkpoint(self, wrapped: Wrapped, model: Any, trial: Any) -> None:
        """Write a checkpoint, push its files, and delete old checkpoints that are not being uploaded."""
        run_dir = Path(self._host.checkpoint_folder(trial))
        folder = self._checkpoints.save(wrapped, run_dir, self._host.state, model, trial)
        if self._host.args.push_to_hub:
            self._host.push_checkpoint(str(folder))
        uploading = {f for job, f in self._pushed_from.items() if not job.done()}
        self._checkpoints.prune(
            run_dir, self._host.state.best_model_checkpoint, {folder, *uploading}
        )

    def push_from_checkpoint(self, wrapped: Wrapped, checkpoint: str) -> None:
        """Push the agent from a checkpoint by upstream's method; log a failure as a warning."""
        # An unfinished checkpoint is uploaded later, under its final name.
        if self._checkpoints.staging is not None:
            return
        folder = Path(checkpoint)
        before = list(self._push_jobs())
        self._pushing = folder
        try:
            with uploads_without(pushing.LEFT_OUT_TOO):
                wrapped(checkpoint)
        except Exception as error:
            pushing.warn_of_failed_push(error, repo_name(self._host), folder)
        finally:
            self._pushing = None
        for job in self._push_jobs():
            if job not in before:
                self._pushed_from[job] = folder
                pushing.watch(job, repo_name(self._host), folder)

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy the agent's and critic's files, which upstream omits when it pushes from a checkpoint.

        Upstream calls this method after the decision to push and before it copies any file.
        """
        folder, run_dir = self._pushing, Path(args.output_dir)
        if folder is None:
            return
        shutil.copyfile(folder / AGENT_FILE, run_dir / AGENT_FILE)
        if (folder / CRITIC_FOLDER).is_dir():
            shutil.copytree(folder / CRITIC_FOLDER, run_dir / CRITIC_FOLDER, dirs_exist_ok=True)

    def _push_jobs(self) -> list[Any]:
        progress = getattr(self._host, "push_in_progress", None)
        return [] if progress is None else progress.jobs

    def finish(self, wrapped: Wrapped, *args: Any) -> Any:
        """End a training by upstream's method, then delete old checkpoints whose uploads have ended."""
        result = self._checkpoints.finish(wrapped, self._host.state, *args)
        if self._pushed_from:
            self._checkpoints.prune(self._run_dir, self._host.state.best_model_checkpoint)
        return result

    def _agent_settings(self) -> AgentSettings:
        """Return the settings of evaluation episodes, for `agent.json`."""
        host, rollout, fields = self._host, self._rollout, dataclasses.asdict(self._limits)
        model = host.accelerator.unwrap_model(host.model)
        known: Any = getattr(model.config, "quantization_config", None)
        quantization = _as_json(known.to_dict()) if hasattr(known, "to_dict") else None
        # The model's own configuration has this limit.
        del fields["max_context_tokens"]
        return AgentSettings(
            max_completion_length=fields.pop("max_completion_tokens"),
            **fields,
            sampling=_sampling(host),
            eos_token_ids=[int(i) for i in host.eos_token_ids],
            chat_template_kwargs=_as_json(host.chat_template_kwargs or {}),
            environments=[
                {
                    "name": name,
                    "kind": "text" if name in rollout.text else "tools",
                    "class": type(probe).__qualname__,
                    "import": f"{type(probe).__module__}:{type(probe).__qualname__}",
                }
                for name, probe in rollout.probes.items()
            ],
            tools=[name_of(tool) for tool in rollout.standalone_tools],
            trainer=type(host).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=quantization,
            seed=host.args.seed,
        )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _sampling(host: Bridge) -> dict[str, Any]:
    """Return sampling settings of evaluation, with training's temperature if evaluation is greedy."""
    args = host.args
    names = [f.name for f in dataclasses.fields(SamplingSettings) if f.name != "do_sample"]
    settings = None
    if not host.use_vllm:
        own = host.accelerator.unwrap_model(host.model).generation_config
        settings, _ = SamplingSettings.from_generation_config(host.generation_config, own)
    known = {name: getattr(settings or args, name) for name in names}
    overrides = {name: value for name, value in args.eval_settings.items() if name in known}
    if overrides.get("temperature") == 0:
        del overrides["temperature"]
    return known | overrides
