"""What lies beside a policy: the settings to play it with, `agent.json`, and its model card."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ...generation.sampling import SamplingSettings
from ...hub import card
from ...hub.description import Description
from ...hub.fetching import licence_of
from ...hub.markdown import plain
from ...hub.settings import AgentSettings
from ...rollout.episode import Limits
from .._trl import get_config_model_id
from ..evaluation.settings import SAMPLING
from ..host import Host, Upstream
from ..loop.sampler import sampling_settings
from .describe import as_json, hub_datasets
from .shown_episode import offered_rows, shown_episode


def agent_settings(host: Host, run: Description, limits: Limits) -> AgentSettings:
    """How the trainer's evaluation plays."""
    args, told = host.args, dataclasses.asdict(limits)
    del told["max_context_tokens"]  # the model's
    return AgentSettings(
        max_completion_length=told.pop("max_completion_tokens"),
        **told,
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


def _sampling(host: Host) -> dict[str, Any]:
    """How evaluation draws; a temperature of 0 is the agent's `greedy`."""
    args = host.args
    names = [f.name for f in dataclasses.fields(SamplingSettings) if f.name != "do_sample"]
    settings = None if host.use_vllm else sampling_settings(host)[0]
    known = {name: getattr(settings or args, name) for name in names}
    told = {name: args.eval_settings[name] for name in SAMPLING if name in args.eval_settings}
    if told.get("temperature") == 0:
        del told["temperature"]
    return known | told


# ------------------------------------------------------------------ the model card


def card_names(own: str, dataset_name: str | None, rows: Any) -> tuple[str, str | None]:
    """Names that TRL's template may have as they are, on one line."""
    data = next(iter([*_public(dataset_name), *hub_datasets(rows)]), None)
    return plain(own), None if data is None else plain(data)


def improve_card(
    host: Host,
    upstream: Upstream,
    run: Description,
    settings: AgentSettings,
    title: str,
    dataset: str | None,
    *,
    pushes: bool,
    draw: bool,
) -> None:
    """Make an agent's card of TRL's, which has just been written; title and dataset of `card_names`.

    Only where it `pushes` it, a look at the Hub for the base model's licence is no surprise.
    """
    args, base = host.args, get_config_model_id(host.model.config) or None
    is_local = base is not None and (os.path.isdir(base) or os.path.isabs(base))
    row = _first_row(host.train_dataset)
    offered = offered_rows(run, host.train_dataset, host.eval_dataset)
    card.improve(
        Path(args.output_dir),
        run,
        title=title,
        repo=host.hub_model_id or str(args.output_dir),
        base_model=None if is_local else base,
        licence=licence_of(base) if is_local or pushes else None,
        datasets=[dataset] if dataset else hub_datasets(host.train_dataset),
        tags=[*upstream.tags, "agent"],
        example=_blank(row),
        offered=offered,
        episode=shown_episode(Path(args.output_dir), host.eval_dataset) if offered else None,
        system_prompt=_system_prompt(row.get("prompt")),
        play=vars(settings),
        turn_ends=upstream.tokenizer.convert_ids_to_tokens(list(host.eos_token_ids)),
        history=list(host.state.log_history),
        draw=draw,
    )


def _first_row(rows: Any) -> dict[str, Any]:
    """A stream is left alone."""
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or len(rows) == 0:
        return {}
    row = rows[0]
    return dict(row) if isinstance(row, dict) else {}


def _blank(value: Any, key: str = "") -> Any:
    """The form of a value without what it says: nobody can tell here whether rows are public.

    Not even by the name of a dataset on the Hub: it may be private, and rows are mapped and joined.
    What is no plain data is None.
    """
    if isinstance(value, dict):
        return {str(name): _blank(part, name) for name, part in value.items()}
    if isinstance(value, list):
        shown = value[:2] if value and isinstance(value[0], dict) else value[:1]
        return [_blank(part) for part in shown]
    if isinstance(value, str):
        return value if key == "role" else "..."
    return type(value)() if isinstance(value, (bool, int, float)) else None


def _system_prompt(prompt: Any) -> str | None:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if not isinstance(first, dict) or first.get("role") != "system":
        return None
    said = first.get("content")
    return said if isinstance(said, str) else None


def _public(name: str | None) -> list[str]:
    """The id of data on the Hub: not a path, nor rows that this package makes itself."""
    if name is None or os.path.isabs(name) or os.path.exists(name):
        return []
    return [name] if "/" in name.strip("./~") else []
