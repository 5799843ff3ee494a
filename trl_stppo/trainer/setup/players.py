"""Builds the player of episodes and its rollout engines."""

from __future__ import annotations

import copy
import dataclasses
import logging
import weakref
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...generation.sampling import shaping
from ...rollout.agent_driver import AgentDriver
from ...rollout.chat import ChatRenderer
from ...rollout.driver import Driver, TextDriver
from ...rollout.engine import RolloutEngine
from ...rollout.environments import EnvironmentPool
from ...rollout.episode import Limits
from ...rollout.openai_wire import AgentEndpoint
from ...rollout.tool_driver import ToolDriver
from ...rollout.workers import EnvironmentCalls
from .._trl import GRPOTrainer, overrides, prepare_tool_tokenizer, read_message, training_template
from ..bridge import Bridge
from ..loop.player import EpisodePlayer
from ..loop.sampler import TurnSampler
from ..loop.vllm import VLLM
from ..planning.data import is_conversational
from ..planning.plan import RolloutPlan

logger = logging.getLogger(__name__)


def build_player(
    host: Bridge, rollout: RolloutPlan, evaluation: RolloutPlan, context: int | None
) -> EpisodePlayer:
    """Build the player of episodes, of `context` tokens at most, with its engines."""
    # Copy the tokenizer for an overlap, because two threads must not change its state.
    args, accelerator, tokenizer = host.args, host.accelerator, host.text_tokenizer
    tokenizer = copy.deepcopy(tokenizer) if args.rollout_overlap else tokenizer
    generation = host.vllm_generation if args.use_vllm else None
    vllm = VLLM(args, accelerator, generation, lambda: host.state.global_step, host.load_vllm)
    sampler = TurnSampler(
        args,
        accelerator,
        tokenizer,
        vllm,
        host.eos_token_ids,
        policy=lambda: host.model,
        wrapped=lambda: host.model_wrapped,
        generation_config=lambda: host.generation_config,
        generate=host.generate_turns,
        why_own=lambda: why_own_turns(host),
        reader=host.reader,
    )
    warn_of_hidden_settings(host)
    if args.rollout_overlap and (reason := why_not_ahead(host, sampler)) is not None:
        raise ValueError(f"`rollout_overlap=True` is not supported with {reason}.")

    def by_func(prompts: list[Any]) -> Any:
        # The function may generate with vLLM, which then needs the current weights.
        if host.use_vllm:
            vllm.sync()
        assert host.rollout_func is not None
        return host.rollout_func(prompts, host)

    engines = build_engines(host, tokenizer, rollout, evaluation, context)
    return EpisodePlayer(
        sampler,
        *engines,
        renderer(host, tokenizer),
        None if host.rollout_func is None else by_func,
        host.train_dataset,
        host.accelerator,
        host.end_ids,
        host.pad_to_multiple_of,
        owns_prompts=rollout.owns_prompts,
        hides_truncated=host.mask_truncated_completions,
    )


def renderer(host: Bridge, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """Make the chat renderer for a trainer's template and a tokenizer."""
    return ChatRenderer(
        tokenizer,
        host.eos_token_ids,
        chat_template=host.chat_template,
        template_kwargs=host.chat_template_kwargs,
        reader=host.reader,
    )


def why_own_turns(trainer: GRPOTrainer) -> str | None:
    """Return a text if a trainer overrides upstream's method that generates turns, else None."""
    own = overrides(trainer, "_generate_single_turn")
    return f"{type(trainer).__name__} generates by itself." if own else None


def warn_of_hidden_settings(host: Bridge) -> None:
    """Warn of settings in the model's own generation configuration that the ratios ignore."""
    if host.use_vllm or host.rollout_func is not None or not host.accelerator.is_main_process:
        return
    own = host.accelerator.unwrap_model(host.model).generation_config.to_diff_dict()
    given = [name for name, value in host.generation_kwargs.items() if value is not None]
    if hidden := shaping(own, [*given, "cache_implementation"]):
        logger.warning(
            "`model.generation_config` has %s: it shapes what is sampled, and the ratios ignore it.",
            ", ".join(hidden),
        )


def why_not_ahead(host: Bridge, sampler: TurnSampler) -> str | None:
    """Return why rollouts cannot be played during the update before them, or None if they can."""
    if host.rollout_func is not None:
        return "a `rollout_func`; allowed are environments, tools and plain prompts"
    if not hasattr(host.train_dataset, "__len__"):
        return "a stream as `train_dataset`; allowed: a `datasets.Dataset`"
    if not host.use_vllm and (cause := sampler.why_not_cached()) is not None:
        return f"turns that go through `generate` ({cause}); use a vLLM server"
    if host.use_vllm and not sampler.speaks_to_vllm:
        return "an overridden `_generate_single_turn`; leave it out"
    return None


def build_engines(
    host: Bridge,
    tokenizer: PreTrainedTokenizerBase,
    rollout: RolloutPlan,
    evaluation: RolloutPlan,
    context: int | None,
) -> tuple[RolloutEngine, RolloutEngine]:
    """Build one rollout engine for training and one for evaluation, with separate environments."""
    if rollout.agent is not None:
        template = agent_template(renderer(host, tokenizer))
        host.chat_template = host.chat_template or template
    elif rollout.text and host.chat_template is None:
        try:
            host.chat_template = growing_template(renderer(host, tokenizer))
        except ValueError:
            # Plain prompts need no template.
            if is_conversational(host.train_dataset):
                raise
    args, held_out = host.args, host.args.eval_settings
    limits = Limits(
        max_completion_tokens=args.max_completion_length,
        max_turns=args.max_turns,
        max_turn_tokens=args.max_turn_tokens,
        max_context_tokens=context,
        max_tool_rounds=args.max_tool_calling_iterations,
        max_images=args.max_images,
        env_timeout_seconds=args.env_timeout_seconds,
    )
    reader, endpoint = renderer(host, tokenizer), args.agent_endpoint
    if is_conversational(host.train_dataset) and (split := reader.control.split_tokens):
        logger.warning(
            "The chat template of %r writes %s, which this tokenizer reads as several ordinary tokens: the "
            "template is another model's.", tokenizer.name_or_path, ", ".join(split),
        )  # fmt: skip
    engine = assemble(rollout, reader, limits, agent_endpoint=endpoint)
    if "max_completion_length" in held_out:
        limits = dataclasses.replace(limits, max_completion_tokens=held_out["max_completion_length"])
    others = rollout is not evaluation
    eval_engine = assemble(evaluation, reader, limits, probes_play=others, agent_endpoint=endpoint)
    eval_engine.warned = engine.warned
    for each in (engine, eval_engine):
        weakref.finalize(host, each.close)
    return engine, eval_engine


def assemble(
    rollout: RolloutPlan,
    renderer: ChatRenderer,
    limits: Limits,
    *,
    probes_play: bool = True,
    agent_endpoint: bool = False,
) -> RolloutEngine:
    """Build an engine: a driver for each factory; without a factory, one for tools or plain prompts.

    If `probes_play`, the probed instances play too.
    """
    calls, parse = EnvironmentCalls(), partial(read_message, renderer)
    players = rollout.probes if probes_play else None
    pool = EnvironmentPool({**rollout.text, **rollout.tools}, players)
    decode, run_async, tools = renderer.decode_action, calls.run_async, rollout.standalone_tools
    on_main = calls.run_on_poller
    drivers: dict[str | None, Driver] = {}
    for name in rollout.text:
        drivers[name] = TextDriver(pool, name, rollout.probes[name], decode, run_async)
    for name in rollout.tools:
        probe = rollout.probes[name]
        drivers[name] = ToolDriver(pool, name, probe, tools, parse, run_async, on_main)
    if rollout.agent is not None:
        endpoint = AgentEndpoint() if agent_endpoint else None
        drivers[None] = AgentDriver(rollout.agent, renderer, parse, limits, endpoint=endpoint)
    if not drivers:
        drivers[None] = ToolDriver(None, None, None, tools, parse, run_async, on_main)
    for driver in drivers.values():
        driver.reader = renderer.reader
    return RolloutEngine(drivers, pool, calls, limits)


def agent_template(renderer: ChatRenderer) -> str | None:
    """Return the chat template for an agent's calls, or None for the tokenizer's own template.

    If TRL has a format for the tokenizer, tool calls are parsed from now on; otherwise they stay text.
    """
    try:
        template = prepare_tool_tokenizer(renderer.tokenizer)
    except ValueError:
        template = None
    return template or growing_template(renderer)


def growing_template(renderer: ChatRenderer) -> str | None:
    """Return TRL's training template if it preserves turns and the tokenizer's own does not, else None."""
    tokenizer = renderer.tokenizer
    # Without a template only plain text works: tokenising messages raises an error.
    if tokenizer.chat_template is None or renderer.preserves_turns():
        return None
    template = training_template(tokenizer)
    if template is not None and renderer.with_options(chat_template=template).preserves_turns():
        return template
    logger.warning(
        "The chat template of %r renders earlier turns differently once others follow. An episode keeps the "
        "sampled tokens, so the policy reads its earlier turns otherwise than with this template.",
        tokenizer.name_or_path,
    )
    return None
