"""Contexts that apply evaluation's settings and restore training's state."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from .._trl import new_token_limit, replaced
from ..bridge import Bridge

# Keys of `eval_generation_kwargs` that control token sampling.
SAMPLING = ("temperature", "top_p", "top_k")


@contextmanager
def undisturbed(host: Bridge) -> Iterator[None]:
    """Context manager that seeds by `args.seed`, then restores random states, metrics and mode."""
    internals, figures = host.internals, host.internals.figures
    training = host.model.training
    states = random.getstate(), np.random.get_state()
    device = host.accelerator.device
    forked = [] if device.type in ("cpu", "mps") else [device.index or 0]
    with torch.random.fork_rng(
        devices=forked, device_type=device.type if forked else "cuda", enabled=True
    ):
        try:
            metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
            logs = {name: _emptied(entry) for name, entry in internals.logs.items()}
            internals.figures = metrics, logs, defaultdict(list), defaultdict(list)
            set_seed(host.args.seed, device_specific=True)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            internals.figures = figures
            if host.model.training != training:
                host.model.train(training)


def _emptied(entry: Any) -> Any:
    if isinstance(entry, deque):
        return deque(maxlen=entry.maxlen)
    return defaultdict(entry.default_factory)


@contextmanager
def evaluation_settings(host: Bridge) -> Iterator[None]:
    """Context manager that applies `eval_generation_kwargs`, and sets `num_generations_eval` to 1."""
    overrides = host.args.eval_settings
    sampling = {name: overrides[name] for name in SAMPLING if name in overrides}
    with ExitStack() as stack:
        if sampling:
            stack.enter_context((_vllm_sampling if host.use_vllm else _sampling)(host, sampling))
        if "max_completion_length" in overrides:
            stack.enter_context(new_token_limit(host, overrides["max_completion_length"]))
        stack.enter_context(replaced(host, num_generations_eval=1))
        yield


def _sampling(host: Bridge, sampling: dict[str, Any]) -> AbstractContextManager[None]:
    """Context manager that applies sampling settings to generation with transformers."""
    if sampling.get("temperature") == 0.0:
        sampling = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    elif "temperature" in sampling:
        sampling = {**sampling, "do_sample": True}
    config, kwargs = copy.deepcopy(host.generation_config), {**host.generation_kwargs, **sampling}
    for name, value in sampling.items():
        setattr(config, name, value)
    return replaced(host, generation_config=config, generation_kwargs=kwargs)


def _vllm_sampling(host: Bridge, sampling: dict[str, Any]) -> AbstractContextManager[None]:
    """Context manager that applies sampling settings to vLLM, for which temperature 0 means greedy."""
    vllm = host.vllm_generation
    others = {k: v for k, v in vllm.generation_kwargs.items() if k not in sampling}
    return replaced(vllm, **sampling, generation_kwargs=others)
