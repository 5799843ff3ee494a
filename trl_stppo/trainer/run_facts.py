"""What a trainer tells of itself: settings to play its policy with, and facts for the model card."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..generation.sampling import SamplingSettings
from ..hub.facts import CardFacts, EnvironmentFacts
from ..hub.fetching import licence_of
from ..hub.markdown import plain
from ..hub.settings import AgentSettings
from ..models.critic import SharedCritic
from ..rollout.episode import Limits
from ..version import __version__
from . import rollout_engine
from ._trl import get_config_model_id

if TYPE_CHECKING:
    from .publishing import AgentPublishing

# Options that a reader of the card asks for first; those that a configuration lacks are left out.
SETTINGS = (
    *("variant", "importance_sampling_level", "clip_bias_normalization", "clip_bias_target"),
    *("epsilon", "gamma", "lam", "advantage_level", "cliprange_value", "kl_coef", "beta"),
    *("learning_rate", "critic_learning_rate", "critic_warmup_steps", "optim", "lr_scheduler_type"),
    *("max_grad_norm", "max_steps", "generation_batch_size", "num_generations", "num_iterations"),
    *("num_mini_batches", "temperature", "loss_type", "whiten_advantages", "rollout_staleness"),
    *("bf16", "seed"),
)
IDLE_AT_ZERO = ("beta", "kl_coef", "critic_warmup_steps", "rollout_staleness", "bf16")
CRITICS_OWN = ("critic_learning_rate", "critic_warmup_steps", "cliprange_value", "gamma", "lam")
LIMITS = {
    "max_completion_tokens": "tokens after the prompt",
    "max_turns": "turns",
    "max_turn_tokens": "tokens of a turn",
    "max_tool_rounds": "turns whose tools are called",
    "max_malformed_actions": "unreadable turns",
}
EXAMPLE_CHARACTERS = 600
_CACHED = re.compile(r"([\w.-]*[^\W_])___([^\W_][\w.-]*)")


# ----------------------------------------------------------------------- to play


def agent_settings(trainer: AgentPublishing) -> AgentSettings:
    """How the trainer's evaluation plays."""
    limits, model = eval_limits(trainer), trainer.accelerator.unwrap_model(trainer.model)
    quantization = getattr(model.config, "quantization_config", None)
    to_dict = getattr(quantization, "to_dict", None)
    plain_kwargs = json.loads(json.dumps(trainer.chat_template_kwargs or {}, default=str))
    return AgentSettings(
        max_completion_length=limits.max_completion_tokens,
        max_turns=limits.max_turns,
        max_turn_tokens=limits.max_turn_tokens,
        max_tool_rounds=limits.max_tool_rounds,
        max_malformed_actions=limits.max_malformed_actions,
        env_timeout_seconds=limits.env_timeout_seconds,
        episode_timeout_seconds=limits.episode_timeout_seconds,
        sampling=_sampling(trainer),
        eos_token_ids=[int(i) for i in trainer.eos_token_ids],
        chat_template_kwargs=plain_kwargs,
        environments=[
            {
                "name": facts.name,
                "kind": facts.kind,
                "class": facts.class_name,
                "import": f"{facts.module}:{facts.class_name}",
            }
            for facts in environment_facts(trainer)
        ],
        tools=[name for name, _ in _tool_facts(trainer._rollout_plan.standalone_tools)],
        trainer=type(trainer).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=None if to_dict is None else json.loads(json.dumps(to_dict(), default=str)),
        seed=trainer.args.seed,
    )


def eval_limits(trainer: AgentPublishing) -> Limits:
    """Of an episode in evaluation, also where nothing but single answers is played."""
    if trainer._eval_engine is not None:
        return trainer._eval_engine.limits
    args = trainer.args
    return Limits(args.eval_max_completion_length or args.max_completion_length)


def _sampling(trainer: AgentPublishing) -> dict[str, Any]:
    """How evaluation draws; a temperature of 0 is the agent's `greedy`."""
    args = trainer.args
    settings = None if trainer.use_vllm else rollout_engine._settings(trainer)[0]
    if settings is None:
        settings = SamplingSettings(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
        )
    known = dataclasses.asdict(settings)
    given = {
        "temperature": args.eval_temperature or None,
        "top_p": args.eval_top_p,
        "top_k": args.eval_top_k,
    }
    known.update({name: value for name, value in given.items() if value is not None})
    del known["do_sample"]
    return known


# ----------------------------------------------------------------- for the model card


def card_names(
    trainer: AgentPublishing, model_name: str | None, dataset_name: str | None
) -> tuple[str, str | None]:
    """Names that TRL's template may have as they are, on one line."""
    own = model_name or Path(trainer._repo_name()).name
    data = next(iter([*_public(dataset_name), *hub_datasets(trainer)]), None)
    return plain(own), None if data is None else plain(data)


def card_facts(trainer: AgentPublishing, title: str, dataset: str | None) -> CardFacts:
    """Everything that the card says beside TRL's."""
    args, model = trainer.args, trainer.model
    base = get_config_model_id(model.config) or None
    local = base is not None and (os.path.isdir(base) or os.path.isabs(base))
    asks = local or (trainer.hub_model_id is not None and not trainer._saving_checkpoint)
    row = _first_row(trainer)
    datasets = [dataset] if dataset else hub_datasets(trainer)
    adapter = _adapter(model)
    return CardFacts(
        title=title,
        repo=trainer.hub_model_id or str(args.output_dir),
        method=trainer._name,
        paper=trainer._paper.get("id"),
        trainer=type(trainer).__name__,
        variant=getattr(args, "variant", None),
        base_model=None if local else base,
        licence=licence_of(base) if asks else None,
        datasets=datasets,
        tags=[*trainer._tag_names, "agent"],
        adapter=adapter,
        critic=_critic(trainer),
        environments=environment_facts(trainer),
        tools=_tool_facts(trainer._rollout_plan.standalone_tools),
        limits=_limits(trainer),
        system_prompt=_system_prompt(row),
        example=_writable(_blank(row)),
        settings=_settings(trainer, adapter),
        history=list(trainer.state.log_history),
        versions=[("trl-stppo", __version__)],
    )


def environment_facts(trainer: AgentPublishing) -> list[EnvironmentFacts]:
    """What the trainer's environments say of themselves."""
    rollout = trainer._rollout_plan
    facts = []
    for name, probe in rollout.probes.items():
        kind, cls = ("text" if name in rollout.text else "tools"), type(probe)
        tools: tuple[tuple[str, str], ...] = ()
        if kind == "tools" and trainer._engine is not None:
            tools = tuple(_tool_facts(trainer._engine.drivers[name].tools))
        about = inspect.cleandoc(cls.__dict__.get("__doc__") or "").split("\n\n")[0]
        facts.append(EnvironmentFacts(name, kind, cls.__qualname__, cls.__module__, about, tools))
    return facts


def _tool_facts(tools: Any) -> list[tuple[str, str]]:
    names = [(getattr(tool, "__name__", type(tool).__name__), tool) for tool in tools]
    return [(name, (inspect.getdoc(tool) or "").split("\n")[0]) for name, tool in names]


def hub_datasets(trainer: AgentPublishing) -> list[str]:
    """Ids of the data on the Hub, as the paths of their local copies tell: `<namespace>___<name>`."""
    found = []
    for file in getattr(trainer.train_dataset, "cache_files", None) or []:
        parts = (_CACHED.fullmatch(part) for part in Path(file["filename"]).parts)
        found += [f"{part[1]}/{part[2]}" for part in parts if part]
    return list(dict.fromkeys(found))


def _adapter(model: Any) -> str | None:
    config = getattr(model, "peft_config", {}).get("default")
    kind = getattr(config, "peft_type", None)
    kind = getattr(kind, "value", kind)
    return None if kind is None else ("LoRA" if kind == "LORA" else str(kind))


def _critic(trainer: AgentPublishing) -> str | None:
    if not trainer.has_critic:
        return None
    return "shared" if isinstance(trainer.critic, SharedCritic) else "separate"


def _limits(trainer: AgentPublishing) -> list[tuple[str, str]]:
    if not trainer._rollout_plan.uses_engine:
        return []
    limits = dataclasses.asdict(eval_limits(trainer))
    found = [(label, str(limits[n])) for n, label in LIMITS.items() if limits[n] is not None]
    ends = trainer._tokenizer.convert_ids_to_tokens(list(trainer.eos_token_ids))
    found.append(("a turn ends with", " ".join(map(str, ends))))
    stops = (trainer.args.generation_kwargs or {}).get("stop_strings")
    stops = stops or (trainer.args.generation_kwargs or {}).get("stop")
    if stops:
        found.append(("... or with", " ".join([stops] if isinstance(stops, str) else stops)))
    if trainer.chat_template is not None:
        found.append(("chat template", "TRL's training form of the tokenizer's"))
    return found


def _settings(trainer: AgentPublishing, adapter: str | None) -> list[tuple[str, object]]:
    args = trainer.args
    left_out = () if trainer.has_critic else CRITICS_OWN
    found = []
    for name in SETTINGS:
        value = getattr(args, name, None)
        idle = name in IDLE_AT_ZERO and not value
        if value is not None and name not in left_out and not idle:
            found.append((name, getattr(value, "value", value)))
    if adapter is not None:
        config = trainer.model.peft_config["default"]
        modules = getattr(config, "target_modules", None)
        shown = sorted(modules) if isinstance(modules, (set, list)) else modules
        for label, value in (
            ("adapter rank", getattr(config, "r", None)),
            ("adapter alpha", getattr(config, "lora_alpha", None)),
            ("adapter modules", ", ".join(shown) if isinstance(shown, list) else shown),
        ):
            found += [] if value is None else [(label, value)]
    quantization: Any = getattr(trainer.model.config, "quantization_config", None)
    if getattr(quantization, "load_in_4bit", False):
        found.append(("base model", f"4 bits, {quantization.bnb_4bit_quant_type}"))
    return found


# ---------------------------------------------------------------------- one row


def _first_row(trainer: AgentPublishing) -> dict[str, Any]:
    """The first training row; a stream is left alone."""
    rows = trainer.train_dataset
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or len(rows) == 0:
        return {}
    row = rows[0]
    return dict(row) if isinstance(row, dict) else {}


def _system_prompt(row: dict[str, Any]) -> str | None:
    prompt = row.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, dict) and first.get("role") == "system":
        content = first.get("content")
        return content if isinstance(content, str) else None
    return None


def _public(name: str | None) -> list[str]:
    """The id of data on the Hub: not a path, nor rows that this package makes itself."""
    if name is None or os.path.isabs(name) or os.path.exists(name):
        return []
    return [name] if "/" in name.strip("./~") else []


def _blank(value: Any, key: str = "") -> Any:
    """The form of a value without what it says: nobody can tell here whether rows are public.

    Not even by the name of a dataset on the Hub: it may be private, and rows are mapped and joined.
    """
    if isinstance(value, dict):
        return {name: _blank(part, name) for name, part in value.items()}
    if isinstance(value, list):
        shown = value if all(isinstance(part, dict) for part in value) else value[:1]
        return [_blank(part) for part in shown]
    if isinstance(value, str):
        return value if key == "role" else "..."
    return None if value is None else type(value)()


def _writable(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row that can stand in a short piece of code; nothing cut off in the middle."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            continue
        if json.loads(text) == value and len(json.dumps(kept)) + len(text) <= EXAMPLE_CHARACTERS:
            kept[name] = value
    return kept
