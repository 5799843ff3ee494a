"""Files saved beside a policy: `agent.json`, with the settings to play it, and the model card."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from ...errors import TraceError
from ...generation.sampling import SamplingSettings
from ...hub import card
from ...hub.description import Description
from ...hub.markdown import plain
from ...hub.settings import AgentSettings
from ...rollout.episode import Limits
from ...trace.files import read_episodes, read_updates
from .._trl import get_config_model_id
from ..bridge import Bridge
from ..describe import as_json, hub_datasets
from ..evaluation.settings import SAMPLING
from ..loop.sampler import sampling_settings


def agent_settings(host: Bridge, run: Description, limits: Limits) -> AgentSettings:
    """Return the agent's settings, taken from the trainer's evaluation."""
    args, fields = host.args, dataclasses.asdict(limits)
    del fields["max_context_tokens"]  # the model's
    return AgentSettings(
        max_completion_length=fields.pop("max_completion_tokens"),
        **fields,
        sampling=_sampling(host),
        eos_token_ids=[int(i) for i in host.eos_token_ids],
        chat_template_kwargs=as_json(host.chat_template_kwargs or {}),
        environments=[
            {
                "name": each.name,
                "kind": each.kind,
                "class": each.class_name,
                "import": f"{each.module}:{each.class_name}",
            }
            for each in run.environments
        ],
        tools=[name for name, _ in run.tools],
        trainer=run.trainer,
        dtype=run.dtype,
        quantization=run.quantization,
        seed=args.seed,
    )


def _sampling(host: Bridge) -> dict[str, Any]:
    """Return sampling settings of evaluation, with training's temperature if evaluation is greedy."""
    args = host.args
    names = [f.name for f in dataclasses.fields(SamplingSettings) if f.name != "do_sample"]
    settings = None if host.use_vllm else sampling_settings(host)[0]
    known = {name: getattr(settings or args, name) for name in names}
    overrides = {name: args.eval_settings[name] for name in SAMPLING if name in args.eval_settings}
    if overrides.get("temperature") == 0:
        del overrides["temperature"]
    return known | overrides


# ------------------------------------------------------------------ the model card


def card_names(model_name: str, dataset_name: str | None, rows: Any) -> tuple[str, str | None]:
    """Return the model name and dataset name for TRL's template, escaped and on one line."""
    known, given = hub_datasets(rows), dataset_name or ""
    if "/" in given.strip("./~") and not (os.path.isabs(given) or os.path.exists(given)):
        known = [given]
    data = next(iter(known), None)
    return plain(model_name), None if data is None else plain(data)


def improve_card(host: Bridge, run: Description, title: str, dataset: str | None) -> None:
    """Add sections on the agent to TRL's model card; `title` and `dataset` come from `card_names`."""
    args, base = host.args, get_config_model_id(host.model.config) or None
    is_local = base is not None and (os.path.isdir(base) or os.path.isabs(base))
    offered = _offers(run, host.train_dataset, host.eval_dataset)
    card.improve(
        Path(args.output_dir),
        run,
        title=title,
        repo=host.hub_model_id or str(args.output_dir),
        base_model=None if is_local else base,
        datasets=[dataset] if dataset else hub_datasets(host.train_dataset),
        tags=[*host.internals.tags, "agent"],
        history=list(host.state.log_history),
        transcript=_transcript(Path(args.output_dir)) if offered else None,
    )


def _offers(run: Description, *rows: Any) -> bool:
    """Whether the environment class lists all these datasets in its `datasets()`."""
    names = {getattr(getattr(some, "info", None), "dataset_name", None) for some in rows}
    if len(run.environments) != 1 or len(names) != 1 or not run.environments[0].importable:
        return False
    environment = run.environments[0]
    cls = getattr(importlib.import_module(environment.module), environment.class_name, None)
    offer = getattr(cls, "datasets", None)
    return inspect.ismethod(offer) and names.pop() in offer()


def _transcript(folder: Path) -> str | None:
    """Return an episode of the last recorded evaluation as text, a line per message, or None."""
    try:
        held = [entry for entry in read_updates(folder) if entry[0].phase == "eval"]
        episode = next(iter(read_episodes(*held[-1])), None) if held else None
    except TraceError:
        return None
    if episode is None or not isinstance(episode.prompt, list):
        return None
    messages = [*episode.prompt, *(episode.messages or [])]
    lines = [
        f"{m.get('role')}: {plain(m.get('content') or m.get('tool_calls'), 300)}" for m in messages
    ]
    return "\n".join([*lines, f"score {episode.score}"])
