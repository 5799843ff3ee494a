"""Collection of all sources of reward as reward functions of GRPOTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedTokenizerBase

from ...paths import check_name
from ...rollout.reward_funcs import (
    GIVEN,
    CurrentEpisodes,
    RewardFunc,
    check_columns,
    final_rewards_of,
    guarded,
    is_function,
    turn_sums,
)
from ..ppo_config import PPOConfig
from .plan import RolloutPlan

GENERATE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass
class RewardPlan:
    """All reward functions of a run, in GRPOTrainer's form."""

    funcs: list[RewardFunc] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    processing_classes: list[PreTrainedTokenizerBase | None] = field(default_factory=list)
    # Index of a function that this package adds, because GRPOTrainer needs one. It returns the sum of turn
    # rewards for the log; the score leaves it out.
    turn_sum: int | None = None
    current: CurrentEpisodes = field(default_factory=CurrentEpisodes)

    def weights(self, given: list[float] | None) -> list[float] | None:
        """Append a weight of 1 per added function to the caller's weights; None stays None."""
        return given and [*given, *[1.0] * (len(self.funcs) - len(given))]

    def with_environments(self, funcs: Sequence[RewardFunc], names: Sequence[str]) -> list[RewardFunc]:
        """Replace GRPOTrainer's `get_reward` functions by functions that return the engine's results."""
        own = len(self.funcs)
        return [*funcs[:own], *(final_rewards_of(name, self.current) for name in names[own:])]


def check_scores(model: Any, name: str, *, trust: bool) -> None:
    """Refuse a model without a trained head that gives one score, and the name of a missing folder."""
    check_name(name, model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, kind, named = getattr(base, "config", None), type(base).__name__, isinstance(model, str)
    if named:
        with suppress(OSError, ValueError):
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
            kind = (config.architectures or [""])[0]
    if config is None:
        return
    # A configuration without labels reports two, but a model is loaded by name with one.
    labels = config.to_diff_dict().get("id2label", [0]) if named else getattr(config, "id2label", [0])
    other = "SequenceClassification" not in kind and hasattr(transformers, kind)
    if other or kind.endswith(GENERATE) or len(labels) != 1:
        raise ValueError(
            f"`{name}` is a {kind} with num_labels={len(labels)}, without a head that was trained to score. "
            f"Pass a sequence-classification model with num_labels=1, or a function."
        )


def check_reward_weights(args: PPOConfig, number: int) -> None:
    """Refuse `reward_weights` whose length is not the number of reward functions."""
    weights = args.reward_weights
    if weights is not None and len(weights) != number:
        raise ValueError(
            f"`reward_weights` has {len(weights)} entries for {number} reward functions; give one each."
        )


def plan_rewards(
    args: PPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    reward_model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    rollout: RolloutPlan,
    columns: tuple[str, ...] | None,
    *,
    scores_turns: bool,
) -> RewardPlan:
    """Collect all sources of reward; `columns` are the columns that functions receive, None if unknown."""
    funcs = [] if reward_funcs is None else reward_funcs
    funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
    classes = processing_classes if isinstance(processing_classes, list) else [processing_classes]
    classes = [None] * len(funcs) if processing_classes is None else list(classes)
    check_reward_weights(args, len(funcs))
    takes_columns = rollout.owns_prompts or scores_turns or any(map(is_function, funcs))
    if args.remove_unused_columns and takes_columns and columns:
        raise ValueError(
            f"`remove_unused_columns=True` removes `{'`, `'.join(columns)}`, which environments, agents and "
            f"reward functions take; leave it out."
        )
    fields = [f"reward_funcs[{i}]" for i in range(len(funcs))]
    for i, func in enumerate(funcs):
        check_scores(func, fields[i], trust=args.trust_remote_code)
        if columns is not None and is_function(func):
            environments = ["environments"] if rollout.tools else []
            check_columns(func, [*GIVEN, *environments, *columns], columns)
    if reward_model is not None:
        check_scores(reward_model, "reward_model", trust=args.trust_remote_code)
        fields.append("reward_model")
        funcs.append(reward_model)
        classes.append(tokenizer)
    plan = RewardPlan(fields=fields, processing_classes=classes)
    plan.funcs = [guarded(func, plan.current) for func in funcs]
    may_reward = bool(rollout.tools or rollout.user_func or scores_turns)
    if rollout.text or rollout.agent or (may_reward and not funcs and not rollout.scores_episodes):
        plan.turn_sum = len(plan.funcs)
        plan.funcs.append(turn_sums(plan.current, without=0.0 if scores_turns else None))
        plan.processing_classes.append(None)
    return plan
