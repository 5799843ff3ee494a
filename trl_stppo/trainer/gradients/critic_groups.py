"""Loads optimizer states of versions before 0.2.0, in which norms and biases were no group of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Groups = list[dict[str, Any]]


def in_two_groups(
    state: dict[str, Any], groups: Groups, parameters: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """A saved optimizer state for `groups`, the last two of which are the critic's.

    Until 0.2.0 the critic was one group, of `parameters` in their order. Such a state is cut in two;
    moments and decay stay as they are, so that the run goes on exactly. Any other state is returned as it is.
    """
    *others, critic = state["param_groups"]
    if len(others) != len(groups) - 2 or len(critic["params"]) != len(parameters):
        return state
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    decayed, plain = (
        [critic["params"][place[id(p)]] for p in group["params"]] for group in groups[-2:]
    )
    cut = {**critic, "params": decayed}, {**critic, "params": plain}
    return {**state, "param_groups": [*others, *cut]}


def load_older_states(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Let an optimizer load states in which the critic is one group (bitsandbytes' have no hooks)."""
    load = optimizer.load_state_dict

    def load_any(state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        load(in_two_groups(state, optimizer.param_groups, parameters), *args, **kwargs)

    optimizer.load_state_dict = load_any  # type: ignore[method-assign, assignment]


def complete_schedule(scheduler: Any, groups: int) -> None:
    """Give a scheduler that was loaded for one group fewer the rates of the last one once more."""
    for name in ("base_lrs", "_last_lr", "min_lrs"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == groups - 1:
            rates.append(rates[-1])
