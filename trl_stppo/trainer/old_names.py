"""Names of TRL's former PPOTrainer: attributes answer until 0.3, arguments name the ones of today."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..models.critic import SeparateCritic
from ..wording import did_you_mean

# Argument of one of TRL's versions -> the one of today.
ARGUMENTS = {
    "config": "args",
    "policy": "model",
    "ref_policy": "ref_model",
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "optimizer": "optimizers=(optimizer, None)",
}


def check_arguments(kind: type, model: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that a trainer does not have, and a policy that is missing."""
    if not unknown:
        if model is None:
            raise TypeError(
                f"{kind.__name__} needs a `model`: the policy, by name or as an instance."
            )
        return
    known = [name for name in inspect.signature(kind).parameters if name != "unknown"]
    said = [
        f"`{name}` (TRL's former name) is `{ARGUMENTS[name]}`"
        if name in ARGUMENTS
        else f"`{name}` is none of its arguments. {did_you_mean(name, known) or ''}".rstrip()
        for name in unknown
    ]
    ends = "" if said[-1].endswith(("?", ".")) else "."
    if set(unknown) & set(ARGUMENTS):
        ends += " docs/migration.md has the names of TRL's PPO beside those of here."
    elif any("env" in name for name in unknown):
        ends += " Environments are made by `environment_factory` (docs/environments.md)."
    raise TypeError(
        f"{kind.__name__} was given arguments that it does not have: {'; '.join(said)}{ends}"
    )


def attribute(trainer: Any, name: str) -> Any:
    """What a trainer has under another name now, for its `__getattr__`.

    Raises:
        AttributeError: nothing of that name has moved, or this trainer has none of it.
    """
    kind = type(trainer).__name__
    if name == "step":
        raise AttributeError(
            f"`{kind}` has no `step(queries, responses, scores)` as TRL's PPO had until 0.11: "
            f"`trainer.train()` plays the rollouts, and `reward_funcs` or `reward_model` score them. An "
            f"environment or a `rollout_func` may play them instead."
        )
    own = vars(trainer)
    if name not in ("policy_model", "value_model", "reward_model") or "_publisher" not in own:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    if name == "policy_model":
        found, now = own["model"], "trainer.model"
    elif name == "value_model":
        critic = own["critic"]
        if not isinstance(critic, SeparateCritic):
            raise AttributeError(
                f"`{kind}.value_model`: there is no model of the critic's own here, see `trainer.critic` (a "
                f"{type(critic).__name__})."
            )
        found, now = critic.model, "trainer.critic.model"
    else:
        models = [func for func in own["reward_funcs"] if isinstance(func, nn.Module)]
        if not models:
            raise AttributeError(
                f"`{kind}.reward_model`: rewards come from functions or environments here, see "
                f"`trainer.reward_funcs`."
            )
        found, now = models[-1], "trainer.reward_funcs"
    warnings.warn(
        f"`trainer.{name}` is `{now}` here; the old name goes in 0.3. Use the new one.",
        FutureWarning,
        stacklevel=2,
    )
    return found
