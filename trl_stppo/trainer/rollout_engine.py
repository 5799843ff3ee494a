"""Builds the rollout engine and its backend from what GRPOTrainer has made of the arguments."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from ..errors import EnvironmentFailureError, NonFiniteError
from ..generation.batched import BatchedBackend, GenerateBatch
from ..generation.cached import CachedBackend
from ..generation.collective import CollectiveBackend
from ..generation.protocol import Backend, TurnRequest
from ..generation.sampling import SamplingSettings
from ..generation.slots import supports
from ..rollout.chat import ChatRenderer
from ..rollout.driver import Driver
from ..rollout.engine import RolloutEngine
from ..rollout.environments import EnvironmentPool
from ..rollout.episode import Episode, Limits
from ..rollout.record import RolloutRecord
from ..rollout.text_driver import TextDriver
from ..rollout.tool_driver import ToolDriver, ToolFormat
from ..rollout.workers import EnvironmentCalls
from . import engines, plan
from ._trl import (
    generation_model,
    max_context_tokens,
    new_token_limit,
    parse_response,
    release_environments,
    tool_suffix,
    training_template,
)
from .config_checks import failure_price

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer


def build_engine(trainer: PPOTrainer) -> RolloutEngine | None:
    """The engine for the trainer's environments and tools, None if it has neither.

    Raises:
        ValueError: the chat template cannot grow by appending.
    """
    rollout = trainer._rollout_plan
    if not rollout.uses_engine:
        return None
    if rollout.text and trainer.chat_template is None:
        _make_template_grow(trainer)
    return _assembled(trainer, rollout, _limits(trainer))


def build_eval_engine(trainer: PPOTrainer, rollout: plan.RolloutPlan) -> RolloutEngine | None:
    """The engine that evaluates, with environments of its own, so that those of training stay as they are.

    Args:
        trainer: that has its own engine already.
        rollout: with the factories of evaluation.
    """
    if trainer._engine is None:
        return None
    limits, told = _limits(trainer), trainer.args.eval_settings
    if "max_completion_length" in told:
        limits = dataclasses.replace(limits, max_completion_tokens=told["max_completion_length"])
    shared = rollout is trainer._rollout_plan
    engine = _assembled(trainer, rollout, limits, probes_play=not shared)
    weakref.finalize(trainer, engine.close)
    return engine


def _assembled(
    trainer: PPOTrainer, rollout: plan.RolloutPlan, limits: Limits, *, probes_play: bool = True
) -> RolloutEngine:
    args = trainer.args
    on_env_error, price = failure_price(args.on_env_error)
    return assemble(
        rollout,
        plan.renderer(trainer),
        limits,
        probes_play=probes_play,
        env_workers=args.env_workers,
        isolated=args.env_isolation == "process",
        on_env_error=on_env_error,
        env_error_penalty=price,
    )


def assemble(
    rollout: plan.RolloutPlan,
    renderer: ChatRenderer,
    limits: Limits,
    *,
    env_workers: int = 32,
    isolated: bool = False,
    probes_play: bool = True,
    **on_error: Any,
) -> RolloutEngine:
    """An engine with a driver for every factory.

    Args:
        rollout: factories and tools.
        renderer: decodes what text environments see, and renders what tools answer.
        limits: of an episode.
        env_workers: synchronous environments that run at the same time.
        isolated: give each environment a process of its own.
        probes_play: whether the instances that were looked at may play; False where they play elsewhere.
        on_error: `on_env_error` and `env_error_penalty` of the engine.
    """
    calls, form = EnvironmentCalls(env_workers), tool_format(renderer)
    players = rollout.probes if probes_play else None
    pool = EnvironmentPool({**rollout.text, **rollout.tools}, players, isolate=isolated)
    decode, run_async, tools = renderer.decode_action, calls.run_async, rollout.standalone_tools
    options: dict[str, Any] = {"run_on_main": calls.run_on_poller, "isolated": isolated}
    drivers: dict[str | None, Driver] = {}
    for name in rollout.text:
        probe = rollout.probes[name]
        drivers[name] = TextDriver(pool, name, probe, decode, run_async, isolated=isolated)
    for name in rollout.tools:
        probe = rollout.probes[name]
        drivers[name] = ToolDriver(pool, name, probe, tools, form, run_async, **options)
    if not drivers:
        drivers[None] = ToolDriver(None, None, None, tools, form, run_async, **options)
    return RolloutEngine(drivers, pool, calls, limits, tool_suffix=form.suffix, **on_error)


def tool_format(renderer: ChatRenderer) -> ToolFormat:
    """TRL's functions for tool conversations, for one tokenizer and template."""
    tokenizer = renderer.tokenizer
    return ToolFormat(
        lambda ids, before, tools: parse_response(tokenizer, ids, prefix=before, tools=tools),
        tool_suffix(tokenizer, renderer.control.render, renderer.template),
    )


def take_over(trainer: PPOTrainer, own_rewards: int) -> None:
    """Play episodes ourselves from now on.

    Args:
        trainer: as GRPOTrainer's constructor has left it.
        own_rewards: reward functions that were passed on to it; behind them it has added one for
            each class of environment with a `get_reward`.
    """
    names = trainer.reward_func_names[own_rewards:]
    trainer.reward_funcs[own_rewards:] = [_final_rewards(trainer, name) for name in names]
    if trainer._engine is not None:
        weakref.finalize(trainer, trainer._engine.close)  # at the interpreter's end at the latest
        release_environments(trainer)
        trainer.rollout_func = trainer._play_episodes
    elif trainer._rollout_plan.user_func is not None:
        trainer.rollout_func = trainer._play_user_rollout
    level, form = trainer.args.vllm_importance_sampling_mode.split("_")
    if level == "turn":  # upstream's own levels are replaced afterwards
        trainer.vllm_importance_sampling_mode = f"token_{form}"


def _final_rewards(trainer: PPOTrainer, env_type: str) -> Any:
    """A reward function that tells what the environments of one class have returned as reward."""

    def get_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        record = trainer._record
        pairs = zip(record.final_rewards or [], record.env_types or [], strict=True)
        return [reward if name == env_type else None for reward, name in pairs]

    return get_reward


def _make_template_grow(trainer: PPOTrainer) -> None:
    """Use TRL's training template where the tokenizer's own does not preserve prefixes."""
    try:
        trainer.chat_template = growing_template(plan.renderer(trainer))
    except ValueError:
        if plan.is_conversational(trainer.train_dataset):
            raise


def growing_template(renderer: ChatRenderer) -> str | None:
    """What to use in place of the tokenizer's template, None if that one grows.

    Raises:
        ValueError: it does not, and TRL has no training template for it.
    """
    if renderer.tokenizer.chat_template is None:
        return None  # prompts are plain text, or tokenising the first one explains
    try:
        renderer.check_template()
    except ValueError:
        template = training_template(renderer.tokenizer)
        if template is None:
            raise
        return template
    return None


def _limits(trainer: PPOTrainer) -> Limits:
    args = trainer.args
    return Limits(
        max_completion_tokens=args.max_completion_length,
        max_turns=args.max_turns,
        max_turn_tokens=args.max_turn_tokens,
        max_context_tokens=max_context_tokens(trainer),
        max_tool_rounds=args.max_tool_calling_iterations,
        max_malformed_actions=args.max_malformed_actions,
        env_timeout_seconds=args.env_timeout_seconds,
        episode_timeout_seconds=args.episode_timeout_seconds,
    )


def play(
    trainer: PPOTrainer, engine: RolloutEngine, prompts: list[Any]
) -> tuple[list[Episode], RolloutRecord]:
    """Play the trainer's rows; where one process cannot go on, all stop once they have played.

    Raises:
        EnvironmentFailureError, NonFiniteError: the first of those of the processes.
    """
    failure: Exception | None = None
    episodes: list[Episode] = []
    record = RolloutRecord()
    with turn_backend(trainer) as backend:
        try:
            episodes, record = engine.run(
                trainer._columns,
                prompts,
                plan.renderer(trainer),
                backend,
                trainer._rollout_seed(),
                trainer.accelerator.process_index * len(prompts),
                trainer._names,
            )
        except (EnvironmentFailureError, NonFiniteError) as error:
            failure = error
    raise_first(failure)
    return episodes, record


def raise_first(own: Exception | None) -> None:
    """Raise on all processes what one of them has met."""
    for error in gather_object([own]):
        if error is not None:
            raise error


@contextmanager
def turn_backend(trainer: PPOTrainer) -> Iterator[Backend]:
    """What samples the turns of one rollout: the training weights, or TRL's generation call."""
    capacity = trainer.args.generation_slots
    if is_collective(trainer):
        together = CollectiveBackend(
            _generate_batch(trainer),
            trainer._exchange,
            trainer._tokenizer.eos_token_id,
            capacity=capacity,
        )
        yield together
        together.finish()
        return
    if why_not_cached(trainer) is not None:
        yield BatchedBackend(_generate_batch(trainer), capacity=capacity)
        return
    with generation_model(trainer) as model:
        backend = CachedBackend(
            model,
            _sampling(trainer),
            trainer.eos_token_ids,
            pad_token_id=trainer._tokenizer.pad_token_id,
            capacity=capacity,
        )
        with backend.running():
            yield backend


def why_not_cached(trainer: PPOTrainer) -> str | None:
    """Why turns go through TRL's own generation call; None if they need not."""
    if trainer.use_vllm:
        return "vLLM generates."
    if trainer.use_transformers_continuous_batching:
        return "Continuous batching generates."
    return supports(trainer.accelerator.unwrap_model(trainer.model)) or _settings(trainer)[1]


def tells_logprobs(trainer: PPOTrainer) -> bool:
    """Whether sampled tokens come with log-probabilities."""
    return trainer.use_vllm or why_not_cached(trainer) is None


def _sampling(trainer: PPOTrainer) -> SamplingSettings:
    settings, _ = _settings(trainer)
    assert settings is not None
    return settings


def _settings(trainer: PPOTrainer) -> tuple[SamplingSettings | None, str | None]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return SamplingSettings.from_generation_config(
        trainer.generation_config, model.generation_config
    )


def sample_answers(
    trainer: PPOTrainer, prompt_ids: list[list[int]], seeds: list[tuple[int, ...]]
) -> list[list[int]]:
    """One answer per prompt from the training weights, each from its own seed.

    `generate` draws for a whole batch at once, so that an answer depends on its neighbours.
    """
    limit = trainer.generation_config.max_new_tokens
    answers: dict[int, list[int]] = {}
    failure = None
    with turn_backend(trainer) as backend:
        rows = enumerate(zip(prompt_ids, seeds, strict=True))
        waiting = [TurnRequest(key, ids, limit, seed) for key, (ids, seed) in rows]
        try:
            sample_all(backend, waiting, answers)
        except NonFiniteError as error:
            failure = error
    raise_first(failure)
    return [answers[key] for key in range(len(prompt_ids))]


def sample_all(backend: Backend, waiting: list[TurnRequest], answers: dict[int, list[int]]) -> None:
    """Add the tokens of each turn to `answers`, by its key."""
    size = backend.capacity or len(waiting)
    for start in range(0, len(waiting), size):
        for request in waiting[start : start + size]:
            backend.add(request)
        while backend.busy:
            for result in backend.step():
                answers[result.key] = result.ids
                backend.release(result.key)


def _generate_batch(trainer: PPOTrainer) -> GenerateBatch:
    """TRL's own generation call, whatever it uses."""

    def generate(
        ids: list[list[int]], max_new_tokens: int, seeds: list[tuple[int, ...]]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        with new_token_limit(trainer, max_new_tokens):
            return trainer._generate_single_turn(ids, None, {}, 1)

    return generate


def is_collective(trainer: PPOTrainer) -> bool:
    """Whether a generation call involves other processes, so that all must make it together."""
    if trainer.accelerator.num_processes == 1:
        return False
    if not trainer.use_vllm:
        return engines.shards_weights(trainer.accelerator) and why_not_cached(trainer) is not None
    return trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1
