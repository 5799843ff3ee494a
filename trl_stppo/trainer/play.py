"""Plays episodes with a model, without a trainer: to look at an agent, or to use it."""

from __future__ import annotations

from typing import Any

from ..generation.cached import CachedBackend
from ..generation.sampling import SamplingSettings
from ..rollout.chat import ChatRenderer
from ..rollout.environments import split_environments
from ..rollout.episode import Episode, Limits
from . import plan
from ._trl import prepare_tool_tokenizer
from .rollout_engine import assemble, growing_template, tool_format


def play_episodes(
    model: Any,
    tokenizer: Any,
    environment_factory: Any,
    rows: list[dict[str, Any]],
    limits: Limits,
    sampling: SamplingSettings | None = None,
    *,
    tools: list[Any] | None = None,
    seed: int = 0,
) -> list[Episode]:
    """Play one episode per row, as a trainer would.

    Args:
        model: a causal language model, on its device.
        tokenizer: its tokenizer, with a chat template if prompts are messages.
        environment_factory: as in the trainers, None for tools alone.
        rows: columns of the dataset rows; `prompt` may be missing where the environment has the task.
        limits: of an episode.
        sampling: how tokens are drawn; default as in training, at temperature 1.
        tools: that belong to no environment.
        seed: names the randomness of sampling.

    Raises:
        ValueError: neither environment nor tools, or a template that cannot render what is needed.
    """
    if environment_factory is None and not tools:
        raise ValueError(
            "`environment_factory` and `tools` are both missing, so there is nothing to play. Pass one."
        )
    text, tool_factories, probes = split_environments(environment_factory)
    rollout = plan.RolloutPlan(text, tool_factories, probes, list(tools or []))
    ends = model.generation_config.eos_token_id
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    ends = [*{*(end for end in ends if end is not None), tokenizer.eos_token_id}]
    if tool_factories or tools:
        template = prepare_tool_tokenizer(tokenizer)
    else:
        template = growing_template(ChatRenderer(tokenizer, ends))
    renderer = ChatRenderer(tokenizer, ends, chat_template=template)
    engine = assemble(rollout, renderer, tool_format(tokenizer, template, None), limits)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    backend = CachedBackend(model, sampling or SamplingSettings(), ends, pad_token_id=pad)
    prompts = [plan.prompt_of(row) for row in rows]
    try:
        with backend.running():
            return engine.run(rows, prompts, renderer, backend, (seed,))[0]
    finally:
        engine.close()
