"""Checks of a trainer's arguments, and the plan of its rollouts, before any model is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...envs.base import tool_names, tool_schema
from ...paths import check_name
from ...rollout.environments import Factories, split_environments
from .._trl import check_tool_template, get_config_model_id
from ..ppo_config import PPOConfig

Model: TypeAlias = str | PreTrainedModel
ENGINE_LIMITS = ("max_turns", "max_turn_tokens", "max_images", "generation_slots")


def check_arguments(args: PPOConfig, config_class: type[PPOConfig], data_collator: object) -> None:
    """Refuse arguments that cannot work, before any model is loaded."""
    if not isinstance(args, config_class) or args.trainer_name != config_class.trainer_name:
        raise TypeError(f"`args` is a {type(args).__name__}; this trainer needs a {config_class.__name__}.")
    if data_collator is not None and not hasattr(data_collator, "tokenizer"):
        raise ValueError(
            f"`data_collator` is a {type(data_collator).__name__}; allowed are padding collators."
        )


def check_models(model: object, ref_model: object, reward_model: object, value_model: object) -> None:
    """Refuse the name of a missing folder, a reference by name, and one model object in two roles."""
    check_name("model", model)
    if isinstance(ref_model, str):
        raise TypeError(f"`ref_model` is {ref_model!r}; allowed is a model, not a name.")
    if ref_model is not None and ref_model is model:
        raise ValueError(
            "`ref_model` and `model` are the same object, so the reference would be trained along."
        )
    if value_model is None or isinstance(value_model, str):
        return
    for name, other in (("model", model), ("reward_model", reward_model)):
        if value_model is other:
            raise ValueError(
                f"`value_model` and `{name}` are the same object, and the critic is trained. Pass a copy."
            )


@dataclass(frozen=True)
class RolloutPlan:
    """The source of episodes: the engine, the caller's function, or one plain generation.

    Attributes:
        probes: The instance that each factory made when it was probed.
    """

    text: Factories = field(default_factory=dict)
    tools: Factories = field(default_factory=dict)
    probes: dict[str | None, Any] = field(default_factory=dict)
    standalone_tools: list[Callable[..., object]] = field(default_factory=list)
    user_func: Callable[..., dict[str, list[Any]]] | None = None
    agent: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        standalone = {f"tools[{i}]": tool for i, tool in enumerate(self.standalone_tools)}
        for probe in [self.probes[name] for name in self.tools] or [None]:
            places, owner = dict[str, str](), type(probe).__name__
            names = [] if probe is None else tool_names(probe)
            methods = {f"{owner}.{name}": getattr(probe, name) for name in names}
            for place, tool in (standalone | methods).items():
                name = tool_schema(tool, place)["function"]["name"]
                if (other := places.setdefault(name, place)) != place:
                    raise ValueError(f"`{other}` and `{place}` are tools of one name, {name!r}.")

    @property
    def plays_environment(self) -> bool:
        """Return whether episodes use environments, tools or an agent; False for plain prompts."""
        return bool(self.text or self.tools or self.standalone_tools or self.agent)

    @property
    def owns_prompts(self) -> bool:
        """Return whether an environment or an agent may fill in the prompt of a row."""
        return bool(self.text or self.tools or self.agent)

    @property
    def brings_rewards(self) -> bool:
        """Return whether rewards may come with the episodes, so that no reward function is needed."""
        return bool(self.text or self.tools or self.user_func or self.agent)

    @property
    def scores_episodes(self) -> bool:
        """Return whether an environment scores whole episodes, by `get_reward`."""
        return any(_scores(self.probes[name]) for name in self.tools)

    @property
    def tool_environments(self) -> Any:
        """Return a factory that gives GRPOTrainer the environments that were probed."""
        made = {name: partial(self.probes.__getitem__, name) for name in self.tools}
        return made.get(None, made) or None


def plan_rollout(
    args: PPOConfig, environment_factory: Any, rollout_func: Any, tools: Any, agent: Any = None
) -> RolloutPlan:
    """Plan how episodes are played, from a trainer's arguments."""
    others = environment_factory or rollout_func or tools
    if agent is not None and (others or not callable(agent)):
        raise ValueError(
            f"`agent` is {agent!r:.60}; allowed is a function `(client, row)`, without an "
            f"`environment_factory`, a `rollout_func` or `tools`."
        )
    text, tool_environments, probes = split_environments(environment_factory)
    if rollout_func is not None and (environment_factory or tools):
        raise ValueError("`rollout_func` was given beside `environment_factory` or `tools`.")
    if text and tools:
        raise ValueError("`tools` and a text `environment_factory` were both given.")
    plan = RolloutPlan(text, tool_environments, probes, list(tools or []), rollout_func, agent=agent)
    # An agent chooses the images of its requests itself.
    without = ("max_images",) if plan.agent else ()
    for name in without if plan.plays_environment else ENGINE_LIMITS:
        if getattr(args, name) is not None:
            raise ValueError(f"`{name}={getattr(args, name)}` is for episodes with an environment or tools.")
    return plan


def plan_evaluation(args: PPOConfig, factory: Any, rollout: RolloutPlan) -> RolloutPlan:
    """Plan the rollouts of evaluation; return training's plan if `factory` is None."""
    if rollout.user_func is not None and args.eval_settings:
        raise ValueError(f"`eval_generation_kwargs={args.eval_settings}` cannot reach a `rollout_func`.")
    if factory is None:
        return rollout
    text, tools, probes = split_environments(factory)
    if (set(text), set(tools)) != (set(rollout.text), set(rollout.tools)):
        raise ValueError(
            f"`eval_environment_factory` makes environments with the names {list(probes)}; allowed: those of "
            f"`environment_factory`, {list(rollout.probes)}, each of the same kind, text or tools."
        )
    for key in tools:
        if _scores(probes[key]) != _scores(rollout.probes[key]):
            raise ValueError(
                "`eval_environment_factory` and `environment_factory` must agree on having a `get_reward`."
            )
    return RolloutPlan(text, tools, probes, rollout.standalone_tools)


def _scores(environment: object) -> bool:
    return callable(getattr(type(environment), "get_reward", None))


def fitted_tokenizer(tokenizer: PreTrainedTokenizerBase, rollout: RolloutPlan) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a copy with one of its named chat templates, which must render the tools."""
    tools = bool(rollout.tools or rollout.standalone_tools)
    if isinstance(named := getattr(tokenizer, "chat_template", None), dict):
        tokenizer, name = copy.copy(tokenizer), "tool_use" if tools or rollout.agent else "default"
        tokenizer.chat_template = named.get(name) or named.get("default") or named
    if tools:
        check_tool_template(tokenizer)
    return tokenizer


def model_name(model: Model) -> str:
    """Return the name of a model that is given by name or as an instance."""
    return model if isinstance(model, str) else get_config_model_id(model.config)
