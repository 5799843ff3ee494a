"""Optimizer settings that a resumed run has changed.

A checkpoint restores the parameter groups of its optimizer and the base rates of its scheduler, rates
and decay included. Here values whose setting has changed get the new value. A value that only the
groups had (a callback's, say) stays, and so do all values of an optimizer that the caller has made.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from ..bridge import Bridge
from ..describe import algorithm_settings
from ..optimizers import CRITIC, DECAYED, GIVEN, PLAIN, Optimizers

logger = logging.getLogger(__name__)
Groups = list[tuple[dict[str, Any], str, int | None]]

_RATES = {"learning_rate": (DECAYED, PLAIN), "critic_learning_rate": CRITIC}
# Setting -> key of a group, and index in its value if that is a tuple.
_ADAM = {"adam_beta1": ("betas", 0), "adam_beta2": ("betas", 1), "adam_epsilon": ("eps", None)}
_KEPT = {*_RATES, "weight_decay", *_ADAM}


def renew(host: Bridge, optimizers: Optimizers, folder: Path, saved: dict[str, Any]) -> None:
    """Write changed settings into the optimizers of a resumed run, and log the changes."""
    assert host.optimizer is not None
    groups = _groups(host, optimizers)
    present = algorithm_settings(host.args)
    changed = {n: (saved[n], v) for n, v in present.items() if n in saved and saved[n] != v}
    follows = host.args.derives_critic_rate and "learning_rate" not in changed
    if (follows or not host.has_critic) and "critic_learning_rate" in changed:
        # Only a rate that was set is a new setting.
        host.args.critic_learning_rate, _ = changed.pop("critic_learning_rate")
    without = [n for n in changed if n in _KEPT and not _write(host, groups, n, *changed[n])]
    if not host.accelerator.is_main_process:
        return

    def listed(names: list[str]) -> str:
        return "; ".join(f"{n}: {changed[n][0]!r} -> {changed[n][1]!r}" for n in names)

    if new := [name for name in changed if name not in without]:
        logger.warning("%s: the run goes on with new settings: %s", folder, listed(new))
    if without:
        logger.warning(
            "%s: new, but without effect: %s. The optimizer was passed in as it is, or has no such value.",
            folder, listed(without),
        )  # fmt: skip


def _groups(host: Bridge, optimizers: Optimizers) -> Groups:
    """Return (group, role, index in the scheduler or None) of each parameter group that we made."""
    assert host.optimizer is not None
    groups, roles = host.optimizer.param_groups, optimizers.roles
    found: Groups = []
    if len(groups) == len(roles):
        numbered = enumerate(zip(groups, roles, strict=True))
        found = [(group, role, i) for i, (group, role) in numbered if role != GIVEN]
    if optimizers.critic is not None:
        of_critic = zip(optimizers.critic.param_groups, CRITIC, strict=False)
        found += [(group, role, None) for group, role in of_critic]
    return found


def _of(group: dict[str, Any], key: str, place: int | None) -> Any:
    value = group.get(key)
    if place is None or value is None:
        return value if isinstance(value, (int, float)) else None
    return value[place]


def _write(host: Bridge, groups: Groups, name: str, old: Any, new: Any) -> bool:
    """Write a setting's new value into its parameter groups; return whether any group has the setting."""
    key, place = _ADAM.get(name, (name, None))
    # The setting counts only if `optim` uses it.
    if name in _ADAM:
        _, options = host.get_optimizer_cls_and_kwargs(host.args, host.model)
        if _of(options, key, place) != new:
            return False
    written = False
    for group, role, index in groups:
        if name in _RATES:
            if role in _RATES[name]:
                _set_rate(host.lr_scheduler, group, index, old, new)
                written = True
        elif key in group and (name in _ADAM or role not in (PLAIN, CRITIC[1])):
            old_value = group[key]
            group[key] = new
            if place is not None:
                group[key] = (*old_value[:place], new, *old_value[place + 1 :])
            written = True
    return written


def _set_rate(
    schedule: Any, group: dict[str, Any], index: int | None, old: float, new: float
) -> None:
    """Set a group's base learning rate, and the scheduled rate of the next optimizer step."""
    if index is None:
        # `CriticOptimizer` reads the setting at each step.
        return
    scheduler: Any = getattr(schedule, "scheduler", schedule)
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
