"""What evaluation does differently from training, and how it leaves training as it was."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ...rollout.environments import split_environments
from .._trl import new_token_limit
from ..host import Host, Upstream
from ..ppo_config import PPOConfig
from ..setup.plan import RolloutPlan

# Of `eval_generation_kwargs`, what says how tokens are drawn.
SAMPLING = ("temperature", "top_p", "top_k")


def plan_evaluation(args: PPOConfig, factory: Any, rollout: RolloutPlan) -> RolloutPlan:
    """Who plays the episodes of evaluation.

    Args:
        args: configuration.
        factory: `eval_environment_factory`, None for the environments of training.
        rollout: the plan of training.

    Raises:
        ValueError: environments of another kind than those of training, or settings that nobody would
            keep.
    """
    if rollout.user_func is not None and args.eval_settings:
        raise ValueError(
            f"`eval_generation_kwargs={args.eval_settings}` cannot reach a `rollout_func`, "
            f"which samples by itself. Leave it unset, and let the function look at "
            f"`trainer.model.training`, which is False in evaluation."
        )
    if factory is None:
        return rollout
    if not (rollout.text or rollout.tools):
        raise ValueError(
            "`eval_environment_factory` was given without an `environment_factory`, so nothing would "
            "play it. Pass environment_factory too, or leave it out."
        )
    text, tools, probes = split_environments(factory)
    _check_same_kinds(rollout, text, tools)
    for key in tools:
        makes = [
            f"a {type(env).__name__} {'with' if _scores(env) else 'without'} `get_reward`"
            for env in (probes[key], rollout.probes[key])
        ]
        if _scores(probes[key]) != _scores(rollout.probes[key]):
            raise ValueError(
                f"`eval_environment_factory` makes {makes[0]}, `environment_factory` {makes[1]}. Their "
                f"scores would not be comparable; give both one, or neither."
            )
    return RolloutPlan(text, tools, probes, rollout.standalone_tools)


def _scores(environment: Any) -> bool:
    return callable(getattr(type(environment), "get_reward", None))


def _check_same_kinds(rollout: RolloutPlan, text: Any, tools: Any) -> None:
    for kind, wanted, given in (("text", rollout.text, text), ("tool", rollout.tools, tools)):
        if set(wanted) == set(given):
            continue
        form = "a single factory" if {*rollout.text, *rollout.tools} == {None} else "a dict"
        found, needed = (
            ", ".join("an unnamed one" if name is None else repr(name) for name in names) or "none"
            for names in (given, wanted)
        )
        raise ValueError(
            f"`eval_environment_factory` makes these {kind} environments: {found}; "
            f"`environment_factory` makes: {needed}. Pass {form} with the same names, each of the same "
            f"kind (text: `reset` and `step`; tools: public methods)."
        )


def check_best_metric(args: PPOConfig, eval_dataset: Any) -> None:
    """Refuse, before hours have been spent, to choose the best model by a metric that will not be there."""
    metric = args.metric_for_best_model
    if metric is None or not isinstance(eval_dataset, dict):
        return
    names = list(eval_dataset)
    rest = next(
        (
            metric.removeprefix("eval_").removeprefix(f"{name}_")
            for name in names
            if metric.removeprefix("eval_").startswith(f"{name}_")
        ),
        None,
    )
    if rest is None or rest == "loss":
        raise ValueError(
            f"`metric_for_best_model={metric!r}` (the default with load_best_model_at_end is "
            f"'episode/score') is no metric of the evaluation datasets {names}. Name the dataset and a "
            f"figure of docs/evaluation.md, for example 'eval_{names[0]}_episode/score'."
        )


@contextmanager
def undisturbed(host: Host, upstream: Upstream) -> Iterator[None]:
    """Give everything back as it was: random numbers, figures, mode.

    Inside, the random numbers start from `seed`, for sampling that draws from them.
    """
    figures = upstream.metrics, upstream.logs
    pending = upstream.pending_metrics, upstream.pending_columns
    training = host.model.training
    states = random.getstate(), np.random.get_state()
    device = host.accelerator.device
    forked = [] if device.type in ("cpu", "mps") else [device.index or 0]
    with torch.random.fork_rng(
        devices=forked, device_type=device.type if forked else "cuda", enabled=True
    ):
        try:
            upstream.metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
            upstream.logs = {name: _emptied(entry) for name, entry in upstream.logs.items()}
            upstream.pending_metrics = defaultdict(list)
            upstream.pending_columns = defaultdict(list)
            set_seed(host.args.seed, device_specific=True)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            upstream.metrics, upstream.logs = figures
            upstream.pending_metrics, upstream.pending_columns = pending
            if host.model.training != training:
                host.model.train(training)


def _emptied(entry: Any) -> Any:
    if isinstance(entry, deque):
        return deque(maxlen=entry.maxlen)
    return defaultdict(entry.default_factory)


@contextmanager
def evaluation_settings(host: Host) -> Iterator[None]:
    """Sample as `eval_generation_kwargs` says, each repetition of a row as an episode of its own."""
    told, per_row = host.args.eval_settings, host.num_generations_eval
    given = {name: told[name] for name in SAMPLING if name in told}
    with ExitStack() as stack:
        if given:
            stack.enter_context((_vllm_sampling if host.use_vllm else _sampling)(host, given))
        if "max_completion_length" in told:
            stack.enter_context(new_token_limit(host, told["max_completion_length"]))
        host.num_generations_eval = 1
        try:
            yield
        finally:
            host.num_generations_eval = per_row


@contextmanager
def _sampling(host: Host, given: dict[str, Any]) -> Iterator[None]:
    """Settings of everything that generates with transformers."""
    if given.get("temperature") == 0.0:
        given = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    elif "temperature" in given:
        given = {**given, "do_sample": True}
    config, kwargs = host.generation_config, host.generation_kwargs
    host.generation_config = copy.deepcopy(config)
    for name, value in given.items():
        setattr(host.generation_config, name, value)
    host.generation_kwargs = {**kwargs, **given}
    try:
        yield
    finally:
        host.generation_config, host.generation_kwargs = config, kwargs


@contextmanager
def _vllm_sampling(host: Host, given: dict[str, Any]) -> Iterator[None]:
    """Settings of vLLM, which takes a temperature of 0 for greedy itself."""
    vllm = host.vllm_generation
    kept = {name: getattr(vllm, name) for name in (*given, "generation_kwargs")}
    others = {k: v for k, v in kept["generation_kwargs"].items() if k not in given}
    try:
        for name, value in {**given, "generation_kwargs": others}.items():
            setattr(vllm, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(vllm, name, value)
