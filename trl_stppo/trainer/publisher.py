"""Saves and pushes an agent by upstream's methods; adds critic, `agent.json`, and lines on TRL's card."""

from __future__ import annotations

import dataclasses
import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from ..generation.sampling import SamplingSettings
from ..hub import pushing
from ..hub.settings import AGENT_FILE, SAMPLING, AgentSettings
from ..models.adapters import discard_saved_reference
from ..paths import CRITIC_FOLDER
from ..rollout.episode import Limits
from . import disk
from ._trl import uploads_of
from .bridge import Bridge, Wrapped
from .checkpoints.checkpoints import Checkpoints
from .describe import algorithm_settings
from .planning.plan import RolloutPlan
from .sharding.critics import gathered


class Publisher:
    """Saves one trainer's agent and pushes it to the Hub.

    Methods with a `wrapped` argument wrap upstream's method of the same purpose; its arguments follow.
    """

    def __init__(self, host: Bridge, checkpoints: Checkpoints, rollout: RolloutPlan, limits: Limits) -> None:
        self._host, self._checkpoints = host, checkpoints
        self._rollout, self._limits = rollout, limits
        # Uploads in the background: job -> folder.
        self._uploads: dict[Future[object], Path] = {}

    @property
    def _run_dir(self) -> Path:
        return Path(self._host.args.output_dir)

    def save(self, wrapped: Wrapped, output_dir: str | None, state_dict: object) -> None:
        """Save the policy's files by upstream's method, and the critic and `agent.json`."""
        folder = Path(output_dir or self._run_dir)
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
        if output_dir is None or Path(output_dir) == self._run_dir:
            # The upload in progress reads the files that are overwritten below.
            self._host.finish_push()
        with gathered(self._host.critic, saves=self._host.args.should_save):
            wrapped(output_dir, internal)
        card = self._run_dir / pushing.CARD
        if not internal and self._host.is_world_process_zero() and card.is_file():
            # The last checkpoint wrote the card, before the evaluation of the trained agent.
            self._host.create_model_card(model_name=Path(self._host.hub_model_id or self._run_dir).name)

    def write_card(self, wrapped: Wrapped, *args: object, **kwargs: object) -> None:
        """Implement `AgentTrainer.create_model_card`: write TRL's card, and add results and settings."""
        wrapped(*args, **kwargs)
        host = self._host
        if not host.is_world_process_zero():
            return
        names = (*pushing.SETTINGS, *(pushing.OF_CRITIC if host.has_critic else ()))
        settings = {name: algorithm_settings(host.args).get(name) for name in names}
        repo, card = host.hub_model_id or str(self._run_dir), self._run_dir / pushing.CARD
        pushing.complete_card(card, repo, settings, host.state.log_history)

    def push(self, wrapped: Wrapped, *args: object, **kwargs: object) -> Any:
        """Implement `AgentTrainer.push_to_hub`: upload the agent's files by upstream's method."""
        with uploads_of(self._agent_files, self._uploads):
            return wrapped(*args, **kwargs)

    def save_checkpoint(self, wrapped: Wrapped, model: nn.Module, trial: object) -> None:
        """Write a checkpoint, push its files, and delete old checkpoints that are not being uploaded."""
        run_dir = Path(self._host.checkpoint_folder(trial))
        folder = self._checkpoints.save(wrapped, run_dir, self._host.state, model, trial)
        if self._host.args.push_to_hub:
            self._host.push_checkpoint(str(folder))
        uploading = {f for job, f in self._uploads.items() if not job.done()}
        self._checkpoints.prune(run_dir, self._host.state.best_model_checkpoint, {folder, *uploading})

    def push_from_checkpoint(self, wrapped: Wrapped, checkpoint: str) -> None:
        """Push the agent and, if `hub_strategy` says so, the checkpoint, by upstream's method."""
        # An unfinished checkpoint is uploaded later, under its final name.
        if self._checkpoints.staging is not None:
            return
        source = Path(checkpoint)

        def chosen(folder: Path) -> list[str]:
            if folder == source:
                return [disk.MANIFEST, *disk.read_manifest(folder)["files"]]
            # Upstream has copied only the policy's files.
            shutil.copyfile(source / AGENT_FILE, folder / AGENT_FILE)
            if (source / CRITIC_FOLDER).is_dir():
                shutil.copytree(source / CRITIC_FOLDER, folder / CRITIC_FOLDER, dirs_exist_ok=True)
            return self._agent_files(folder)

        with uploads_of(chosen, self._uploads):
            wrapped(checkpoint)

    def _agent_files(self, folder: Path) -> list[str]:
        return pushing.agent_files(folder, code=self._host.args.trust_remote_code)

    def finish(self, wrapped: Wrapped, *args: object) -> Any:
        """End a training by upstream's method, then delete old checkpoints whose uploads have ended."""
        result = self._checkpoints.finish(wrapped, *args)
        if self._uploads:
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
                f"{type(probe).__module__}:{type(probe).__qualname__}" for probe in rollout.probes.values()
            ],
            trainer=type(host).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=quantization,
            seed=host.args.seed,
        )


def _as_json(value: object) -> Any:
    return json.loads(json.dumps(value, default=str))


def _sampling(host: Bridge) -> dict[str, float | bool | None]:
    """Return sampling settings of evaluation, with training's temperature if evaluation is greedy."""
    args = host.args
    settings = None
    if not host.use_vllm:
        own = host.accelerator.unwrap_model(host.model).generation_config
        settings, _ = SamplingSettings.from_generation_config(host.generation_config, own)
    known = {name: getattr(settings or args, name) for name in SAMPLING}
    overrides = {name: value for name, value in args.eval_settings.items() if name in known}
    if overrides.get("temperature") == 0:
        del overrides["temperature"]
    return known | overrides
