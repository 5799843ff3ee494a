"""Settings of an optimizer that a resumed run has changed.

A checkpoint brings back the parameter groups of its optimizer and the base rates of its scheduler, rates
and decay included. Here those whose setting is another one now get the new value. A value that only the
groups had (a callback's, say) stays, and so does all of an optimizer that the caller has made.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .config_names import renamed
from .describe import algorithm_settings
from .optimizers import CRITIC, DECAYED, GIVEN, PLAIN

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)

_RATES = {"learning_rate": (DECAYED, PLAIN), "critic_learning_rate": (CRITIC,)}
# Setting -> key of a group, and place in its value where that is a tuple.
_ADAM = {"adam_beta1": ("betas", 0), "adam_beta2": ("betas", 1), "adam_epsilon": ("eps", None)}
_KEPT = {*_RATES, "weight_decay", *_ADAM}


def renew(trainer: PPOTrainer, folder: Path, saved: dict[str, Any]) -> None:
    """Let the run go on with the settings that it has now, and say which are new.

    Args:
        trainer: whose optimizers and scheduler have been loaded.
        folder: the checkpoint that they come from.
        saved: its settings.
    """
    saved = {**_adams(trainer), **renamed(saved)}
    present = algorithm_settings(trainer.args)
    changed = {n: (saved[n], v) for n, v in present.items() if n in saved and saved[n] != v}
    without = [n for n in changed if n in _KEPT and not _write(trainer, n, *changed[n])]
    if not trainer.accelerator.is_main_process:
        return

    def said(names: list[str]) -> str:
        return "; ".join(f"{n}: {changed[n][0]!r} -> {changed[n][1]!r}" for n in names)

    if new := [name for name in changed if name not in without]:
        logger.warning("%s: the run goes on with new settings: %s", folder, said(new))
    if without:
        logger.warning(
            "%s: new, but without effect: %s. The optimizer was passed in as it is, or has no such value.",
            folder, said(without),
        )  # fmt: skip


def _groups(trainer: PPOTrainer) -> list[tuple[dict[str, Any], str, int | None]]:
    """Groups that are ours: each with its role, and its place in the scheduler if it has one."""
    groups, roles = trainer.optimizer.param_groups, trainer._optimizers.roles
    found: list[tuple[dict[str, Any], str, int | None]] = []
    if len(groups) == len(roles):
        numbered = enumerate(zip(groups, roles, strict=True))
        found = [(group, role, i) for i, (group, role) in numbered if role != GIVEN]
    if trainer._optimizers.critic is not None:
        found += [(group, CRITIC, None) for group in trainer._optimizers.critic.param_groups]
    return found


def _adams(trainer: PPOTrainer) -> dict[str, Any]:
    """Adam's settings as they were loaded: 0.1.0 did not write them down."""
    for group, *_ in _groups(trainer):
        loaded = {name: _of(group, *place) for name, place in _ADAM.items()}
        return {name: value for name, value in loaded.items() if value is not None}
    return {}


def _of(group: dict[str, Any], key: str, place: int | None) -> Any:
    value = group.get(key)
    if place is None or value is None:
        return value if isinstance(value, (int, float)) else None
    return value[place]


def _write(trainer: PPOTrainer, name: str, old: Any, new: Any) -> bool:
    """Whether the new value of a setting has come to hold in a group."""
    key, place = _ADAM.get(name, (name, None))
    if name in _ADAM:  # does `optim` ask for it at all?
        _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        if _of(options, key, place) != new:
            return False
    written = False
    for group, role, index in _groups(trainer):
        if name in _RATES:
            if role in _RATES[name]:
                _set_rate(trainer, group, index, old, new)
                written = True
        elif key in group and (name in _ADAM or role != PLAIN):
            old_value = group[key]
            group[key] = new
            if place is not None:
                group[key] = (*old_value[:place], new, *old_value[place + 1 :])
            written = True
    return written


def _set_rate(
    trainer: PPOTrainer, group: dict[str, Any], index: int | None, old: float, new: float
) -> None:
    """A new base rate, and the rate that the schedule makes of it for the coming step."""
    if index is None:
        return  # `CriticOptimizer` asks the setting at each step
    scheduler: Any = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    if hasattr(scheduler, "lr_lambdas"):
        rate = new * scheduler.lr_lambdas[index](scheduler.last_epoch)
    else:
        rate = float(group["lr"]) * (new / old if old else 1.0)
    if "initial_lr" in group:
        group["initial_lr"] = new
    for known, value in (("base_lrs", new), ("_last_lr", rate)):
        if hasattr(scheduler, known):
            getattr(scheduler, known)[index] = value
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
