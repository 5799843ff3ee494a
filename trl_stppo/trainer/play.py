"""Plays and scores episodes without a trainer, to inspect, use or evaluate an agent."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerState,
)

from ..errors import EnvironmentFailureError, NonFiniteError
from ..generation.batched import BatchedBackend
from ..generation.cached import CachedBackend
from ..generation.probe import why_unlike
from ..generation.protocol import Backend
from ..generation.sampling import SamplingSettings
from ..generation.slots import supports
from ..rollout.chat import ChatRenderer
from ..rollout.environments import split_environments
from ..rollout.episode import Limits
from ..rollout.images import Image
from ..rollout.reward_funcs import (
    GIVEN,
    CurrentEpisodes,
    RewardFunc,
    called,
    guarded,
    name_of,
    numbered,
    turn_sums,
)
from ._trl import prepare_tool_tokenizer
from .evaluation.metrics import EvaluationRun
from .loop.log import played_episodes
from .loop.player import play_rows, raise_first, seed_batch
from .loop.rewards import EpisodeRewards
from .loop.rollout import Played, Scored
from .planning.data import Row, check_eval_dataset
from .planning.plan import RolloutPlan, fitted_tokenizer
from .planning.rewards import RewardPlan
from .setup.images import make_reader
from .setup.players import agent_template, assemble, growing_template

logger = logging.getLogger(__name__)


class Speaker:
    """Samples turns of a model without a trainer.

    `processing_class` is the model's tokenizer, or its processor if it reads images. `eos_token_ids` end a
    turn, by default the model's and the tokenizer's; `generation_kwargs` are arguments of `generate` that
    `SamplingSettings` lacks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        eos_token_ids: Sequence[int] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        sees = isinstance(processing_class, ProcessorMixin)
        self.reader = make_reader(model, processing_class) if sees else None
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self.model, self.tokenizer = model, tokenizer
        self.eos_token_ids = list(eos_token_ids or _ends(model, tokenizer))
        self._options = dict(generation_kwargs or {})
        pad = tokenizer.pad_token_id
        self._pad = tokenizer.eos_token_id if pad is None else pad

    def renderer(
        self, chat_template: str | None = None, template_kwargs: dict[str, Any] | None = None
    ) -> ChatRenderer:
        """Return a chat renderer of the model's conversations; the template is the tokenizer's by default."""
        options: Any = {"chat_template": chat_template, "template_kwargs": template_kwargs}
        return ChatRenderer(self.tokenizer, self.eos_token_ids, reader=self.reader, **options)

    def backend(self, sampling: SamplingSettings) -> Backend:
        """Return a backend that samples by our cached generation, or by `generate` if the model needs it."""
        given, other = SamplingSettings.from_generation_config(
            GenerationConfig(**self._options), self.model.generation_config
        )
        if supports(self.model) or other is not None or not self._is_right:
            return BatchedBackend(lambda *batch: self._generate(sampling, *batch))
        assert given is not None
        never = [*(given.suppress_tokens or ()), *self._image_ids]
        sampling = replace(sampling, suppress_tokens=never or None)
        options: Any = {"pad_token_id": self._pad, "reader": self.reader}
        return CachedBackend(self.model, sampling, self.eos_token_ids, **options)

    @property
    def _image_ids(self) -> list[int]:
        """Tokens of images, which the policy must not sample."""
        return [] if self.reader is None else [self.reader.image_id]

    @cached_property
    def _is_right(self) -> bool:
        reason = why_unlike(self.model, self._pad, reader=self.reader)
        if reason is not None:
            logger.warning("Turns go through `generate`. %s", reason)
        return reason is None

    def _generate(
        self,
        sampling: SamplingSettings,
        rows: list[list[int]],
        limit: int,
        seeds: list[tuple[int, ...]],
        images: list[tuple[Image, ...]] | None = None,
    ) -> tuple[list[list[int]], None]:
        """Sample turns by the model's `generate`, with torch's random state."""
        longest = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        settings = {k: v for k, v in vars(sampling).items() if v is not None}
        if not sampling.do_sample:
            settings = {
                "do_sample": False,
                "repetition_penalty": sampling.repetition_penalty or 1.0,
            }
        device = self.model.get_input_embeddings().weight.device
        ids = ids.to(device)
        if self.reader is not None:
            own = self.model.generation_config.suppress_tokens
            own = self._options.get("suppress_tokens", own) or ()
            settings["suppress_tokens"] = [*own, *self._image_ids]
            settings |= self.reader.padded_inputs(images or [()] * len(rows), ids)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask.to(device),
            max_new_tokens=limit,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self._pad,
            **{**self._options, **settings},
        )
        # Cut each turn at its end, because padding follows.
        turns = output[:, longest:].tolist()
        ends = [next((n for n, t in enumerate(turn, 1) if t in self.eos_token_ids), None) for turn in turns]
        return [turn[:end] for turn, end in zip(turns, ends, strict=True)], None


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    return [*{*(end for end in ends if end is not None), tokenizer.eos_token_id}]


class Player:
    """Plays rows without a trainer, as a trainer's evaluation does. A context manager releases its workers.

    The arguments are as in the trainer and in `assemble`; `wrap_backend` wraps the speaker's backend.
    Without environments and tools a row gets one turn.
    """

    def __init__(
        self,
        speaker: Speaker,
        factory: Any,
        limits: Limits,
        *,
        tools: list[Callable[..., object]] | None = None,
        agent: Callable[..., object] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        wrap_backend: Callable[[Backend], Backend] | None = None,
        agent_endpoint: bool = False,
    ) -> None:
        text, tool_factories, probes = split_environments(factory)
        self.rollout = RolloutPlan(text, tool_factories, probes, list(tools or []), agent=agent)
        if isinstance(getattr(speaker.tokenizer, "chat_template", None), dict):
            speaker = copy.copy(speaker)
            speaker.tokenizer = fitted_tokenizer(speaker.tokenizer, self.rollout)
        self._speaker, self._wrap = speaker, wrap_backend
        template, self._broken = None, None
        if tool_factories or tools:
            template = prepare_tool_tokenizer(speaker.tokenizer)
        elif self.rollout.plays_environment:
            prepare = agent_template if agent else growing_template
            try:
                template = prepare(speaker.renderer(template_kwargs=template_kwargs))
            except ValueError as error:
                # The error is not raised here, because plain prompts need no template.
                self._broken = error
        self.renderer = speaker.renderer(template, template_kwargs)
        self._engine = assemble(self.rollout, self.renderer, limits, agent_endpoint=agent_endpoint)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def play(
        self,
        rows: list[Row],
        sampling: SamplingSettings,
        seed: tuple[int, ...],
        *,
        names: Sequence[tuple[int, int]],
    ) -> Played:
        """Play one episode per row, seeded by `seed` and its name; environments may supply the prompts."""
        texts = (row.get("prompt", "" if "input_ids" in row else None) for row in rows)
        if self._broken is not None and not all(isinstance(text, str) for text in texts):
            raise self._broken
        backend, owns_prompts = self._speaker.backend(sampling), self.rollout.owns_prompts
        if self._speaker.reader is not None:
            self._speaker.reader.train_on([])
        played = backend if self._wrap is None else self._wrap(backend)
        with backend.running():
            raw = play_rows(
                self._engine,
                self.renderer,
                played,
                rows,
                seed,
                owns_prompts=owns_prompts,
                names=names,
            )
        if raw.failure is not None:
            raise raw.failure
        return Played(*raw[:3], seed, names=names)

    def _scorer(self, functions: Sequence[RewardFunc], missing_eos_penalty: float | None) -> EpisodeRewards:
        """Return a scorer of episodes that uses functions and the environment's rewards.

        The last two columns are the environment's: the episode's reward, and the sum of its turn rewards.
        """
        current = CurrentEpisodes()
        own = [
            lambda **kwargs: [e.final_reward for e in current.episodes],
            turn_sums(current, None),
        ]
        every = [*(guarded(function, current) for function in functions), *own]
        # A trainer logs what functions pass to `log_extra` and `log_metric`.
        logs = [lambda name, value: None] * 2

        def call(environments: Any, rows: list[Row], *parts: list[Any]) -> torch.Tensor:
            more: dict[str, Any] = dict(zip(GIVEN, [*parts, TrainerState(), *logs], strict=True))
            if environments is not None:
                more["environments"] = environments
            run_async = self._engine.calls.run_async
            table = [called(function, rows, run_async, **more) for function in every]
            return torch.tensor([[math.nan if r is None else r for r in rs] for rs in table]).T

        return EpisodeRewards(
            call,
            numbered([name_of(function) for function in functions]),
            RewardPlan(every, turn_sum=len(every) - 1, current=current),
            self.renderer.decode_action,
            {*self.renderer.eos_token_ids},
            missing_eos_penalty,
            shows_environments=bool(self.rollout.tools),
        )

    def evaluate(
        self,
        rows: Dataset | Sequence[Row],
        sampling: SamplingSettings,
        seed: tuple[int, ...],
        functions: Sequence[RewardFunc],
        weights: Sequence[float],
        *,
        missing_eos_penalty: float | None,
        repetitions: int,
        parallel: int,
        on_rollout: Callable[[Played, Scored], None] | None = None,
    ) -> dict[str, float]:
        """Play the rows on all processes, and return their metrics. For the arguments see `Agent.evaluate`.

        The global random generators, which environments may use, are seeded too.
        """
        check_eval_dataset(rows, self.rollout)
        scorer = self._scorer(functions, missing_eos_penalty)
        every = [(row, number) for row in range(len(rows)) for number in range(repetitions)]
        batches = [every[at : at + parallel] for at in range(0, len(every), parallel)]
        run, factors = EvaluationRun([*scorer.names]), [*weights, 1.0, 1.0]
        ends = {*scorer.end_ids, self.renderer.tokenizer.pad_token_id}
        state, failure, has_rewards = PartialState(), None, False
        try:
            for names in batches[state.process_index :: state.num_processes]:
                seed_batch(seed, names)
                rollout = self.play([dict(rows[row]) for row, _ in names], sampling, seed, names=names)
                scored = scorer.score(rollout, torch.tensor(factors), None)
                has_rewards |= bool(scored.counts.any())
                if on_rollout is not None:
                    on_rollout(rollout, scored)
                run.episodes += played_episodes(rollout, scored, names, ends, factors)
        except (EnvironmentFailureError, NonFiniteError) as error:
            # `raise_first` raises the error on all processes, before they gather the metrics.
            failure = error
        raise_first(failure)
        if state.is_main_process and not has_rewards:
            logger.warning("No episode has a reward, so every score is 0: set `reward_funcs`.")
        return run.figures(gather_object)
