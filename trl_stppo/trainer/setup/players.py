"""Builds the player of episodes and its rollout engines."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

from ...rollout.agent_driver import AgentDriver
from ...rollout.agent_endpoint import AgentEndpoint
from ...rollout.chat import ChatRenderer
from ...rollout.driver import Driver
from ...rollout.engine import RolloutEngine
from ...rollout.environments import EnvironmentPool
from ...rollout.episode import Limits
from ...rollout.text_driver import TextDriver
from ...rollout.tool_driver import ToolDriver, ToolFormat
from ...rollout.workers import EnvironmentCalls
from .._trl import (
    max_context_tokens,
    prepare_tool_tokenizer,
    read_message,
    tool_suffix,
    training_template,
)
from ..bridge import Bridge
from ..config.checks import failure_price
from ..loop.player import EpisodePlayer, renderer
from ..loop.sampler import TurnSampler
from ..loop.vllm import VLLM
from ..planning.plan import RolloutPlan
from ..planning.rows import is_conversational


def build_player(host: Bridge, rollout: RolloutPlan, evaluation: RolloutPlan) -> EpisodePlayer:
    """Build the player of episodes with the engines of training and evaluation."""
    tokenizer = host.internals.tokenizer
    if host.args.rollout_overlap:  # two threads must not change the state of one
        tokenizer = copy.deepcopy(tokenizer)
    return EpisodePlayer(
        host,
        TurnSampler(host, tokenizer, VLLM(host)),
        *build_engines(host, tokenizer, rollout, evaluation),
        tokenizer,
        owns_prompts=rollout.owns_prompts,
    )


def build_engines(
    host: Bridge, tokenizer: Any, rollout: RolloutPlan, evaluation: RolloutPlan
) -> tuple[RolloutEngine, RolloutEngine]:
    """Build one rollout engine for training and one for evaluation, with separate environments."""
    if rollout.agent is not None:
        grows = host.chat_template is None and host.args.agent_context == "grow"
        template = agent_template(renderer(host, tokenizer), grows=grows)
        host.chat_template = template or host.chat_template
    elif rollout.text and host.chat_template is None:
        _make_template_grow(host, tokenizer)
    limits, overrides = _limits(host), host.args.eval_settings
    on_env_error, price = failure_price(host.args.on_env_error)
    options: dict[str, Any] = {
        "env_workers": host.args.env_workers,
        "isolated": host.args.env_isolation == "process",
        "on_env_error": on_env_error,
        "env_error_penalty": price,
        "agent_context": host.args.agent_context,
        "agent_endpoint": host.args.agent_endpoint,
    }
    reader = renderer(host, tokenizer)
    engine = assemble(rollout, reader, limits, **options)
    if "max_completion_length" in overrides:
        limits = dataclasses.replace(
            limits, max_completion_tokens=overrides["max_completion_length"]
        )
    others = rollout is not evaluation
    eval_engine = assemble(evaluation, reader, limits, probes_play=others, **options)
    for each in (engine, eval_engine):  # at the interpreter's end at the latest
        weakref.finalize(host, each.close)
    return engine, eval_engine


def assemble(
    rollout: RolloutPlan,
    renderer: ChatRenderer,
    limits: Limits,
    *,
    env_workers: int = 32,
    isolated: bool = False,
    probes_play: bool = True,
    agent_context: str = "grow",
    agent_endpoint: bool = False,
    **options: Any,
) -> RolloutEngine:
    """Build an engine with a driver for every factory, for tools alone, or for prompts alone.

    `env_workers` synchronous environments run at the same time. If `probes_play`, the probed instances
    play too.
    """
    calls, form = EnvironmentCalls(env_workers), tool_format(renderer)
    players = rollout.probes if probes_play else None
    pool = EnvironmentPool({**rollout.text, **rollout.tools}, players, isolate=isolated)
    decode, run_async, tools = renderer.decode_action, calls.run_async, rollout.standalone_tools
    shared: dict[str, Any] = {"run_on_main": calls.run_on_poller, "isolated": isolated}
    drivers: dict[str | None, Driver] = {}
    for name in rollout.text:
        probe = rollout.probes[name]
        drivers[name] = TextDriver(pool, name, probe, decode, run_async, isolated=isolated)
    for name in rollout.tools:
        probe = rollout.probes[name]
        drivers[name] = ToolDriver(pool, name, probe, tools, form, run_async, **shared)
    if rollout.agent is not None:
        renders = agent_context == "render"
        endpoint = AgentEndpoint() if agent_endpoint else None
        drivers[None] = AgentDriver(
            rollout.agent, renderer, form, limits, renders=renders, endpoint=endpoint
        )
    if not drivers:
        drivers[None] = ToolDriver(None, None, None, tools, form, run_async, **shared)
    return RolloutEngine(drivers, pool, calls, limits, tool_suffix=form.suffix, **options)


def tool_format(renderer: ChatRenderer) -> ToolFormat:
    """Return TRL's functions that parse and render tool calls, for a renderer's tokenizer and template."""
    tokenizer = renderer.tokenizer
    return ToolFormat(
        lambda ids, before, tools: read_message(tokenizer, ids, before, tools),
        tool_suffix(tokenizer, renderer.control.render, renderer.template),
    )


def agent_template(renderer: ChatRenderer, *, grows: bool) -> str | None:
    """Return the chat template for an agent's calls, or None for the tokenizer's own template.

    Tool calls are read from now on if TRL has a format for the tokenizer; else they stay in the text.
    `grows`: whether the template must preserve prefixes.
    """
    try:
        template = prepare_tool_tokenizer(renderer.tokenizer)
    except ValueError:
        template = growing_template(renderer) if grows else None
    return template if grows else None


def _make_template_grow(host: Bridge, tokenizer: Any) -> None:
    """Use TRL's training template if the tokenizer's own does not preserve prefixes."""
    try:
        host.chat_template = growing_template(renderer(host, tokenizer))
    except ValueError:
        if is_conversational(host.train_dataset):
            raise


def growing_template(renderer: ChatRenderer) -> str | None:
    """Return TRL's prefix-preserving template, or None if the tokenizer's template preserves prefixes."""
    if renderer.tokenizer.chat_template is None:
        return None  # prompts are plain text, or tokenising the first one raises
    try:
        renderer.check_template()
    except ValueError:
        template = training_template(renderer.tokenizer)
        if template is None:
            raise
        return template
    return None


def _limits(host: Bridge) -> Limits:
    args = host.args
    return Limits(
        max_completion_tokens=args.max_completion_length,
        max_turns=args.max_turns,
        max_turn_tokens=args.max_turn_tokens,
        max_context_tokens=max_context_tokens(host),
        max_tool_rounds=args.max_tool_calling_iterations,
        max_malformed_actions=args.max_malformed_actions,
        env_timeout_seconds=args.env_timeout_seconds,
        episode_timeout_seconds=args.episode_timeout_seconds,
    )
