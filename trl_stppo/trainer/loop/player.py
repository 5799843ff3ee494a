"""Plays the rows of a rollout: environments, tools and plain prompts, or the caller's `rollout_func`."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed
from datasets import Dataset

from ...envs.base import described
from ...errors import EnvironmentFailureError, NonFiniteError, RolloutError
from ...generation.protocol import Backend
from ...generation.sampling import turn_random
from ...rollout.chat import ChatRenderer
from ...rollout.engine import RolloutEngine
from ...rollout.episode import Context, Durations, Episode
from ...rollout.func import read_rollout
from ...rollout.record import cut_off_as_failed
from .._trl import read_message
from ..batch import Tokens, collate
from ..engine import engine_of
from ..planning.data import IMAGE_COLUMNS, Row, rows_with_prompts
from .rollout import EpisodeKey, Played, Raw, Sums
from .sampler import TurnSampler

# Largest number of rows whose images are decoded to find one row.
MOST_COMPARED = 1000


@dataclass(eq=False, repr=False)
class EpisodePlayer:
    """Player of rollouts of training and evaluation.

    Attributes:
        rollout_func: the caller's function of prompts that plays in place of the engines, or None.
        rows: the training rows, whose numbers error messages give.
        owns_prompts: whether rows may lack a prompt.
        end_ids: token ids that can end a complete completion.
        hides_truncated: whether truncated completions do not train.
    """

    sampler: TurnSampler
    engine: RolloutEngine
    eval_engine: RolloutEngine
    renderer: ChatRenderer
    rollout_func: Callable[[list[Any]], Any] | None
    rows: Any
    accelerator: Any
    end_ids: set[int]
    multiple_of: int | None
    owns_prompts: bool
    hides_truncated: bool

    def play(
        self,
        inputs: list[Row],
        seed: tuple[int, ...],
        names: list[EpisodeKey] | None = None,
        repeated: frozenset[int] = frozenset(),
        version: int | None = None,
        step: int | None = None,
        *,
        training: bool,
    ) -> Played:
        """Play one episode per row; `version`: optimizer steps of an older policy that plays, or None.

        `names` identify an evaluation's episodes; `repeated`: indices of episodes that only pad its batch.
        `step`: as in `Played`.
        """
        if self.rollout_func is not None:
            tokenizer, owns = self.renderer.tokenizer, self.owns_prompts
            rows, _ = rows_with_prompts(inputs, tokenizer, owns_prompts=owns)
            return self._play_by_func(self.rollout_func, rows, names, repeated)
        engine = self.engine if training else self.eval_engine
        with self.sampler.backend(version) as backend:
            raw = self.run(engine, backend, inputs, seed, names)
        raise_first(raw.failure)
        return self.finish(raw, seed, {}, names=names, repeated=repeated, step=step)

    def run(
        self,
        engine: RolloutEngine,
        backend: Backend,
        inputs: list[Row],
        seed: tuple[int, ...],
        names: list[EpisodeKey] | None = None,
    ) -> Raw:
        """Play the episodes with an engine by `play_rows`; error messages name training rows by index."""
        return play_rows(
            engine,
            self.renderer,
            backend,
            inputs,
            seed,
            owns_prompts=self.owns_prompts,
            first_row=self.accelerator.process_index * len(inputs),
            names=names,
            label=None if names is not None else lambda row: self._label(inputs[row]),
        )

    def _label(self, row: Row) -> str:
        """Return the name of a training row for error messages."""
        numbers, images = self._numbers.get(_words(row), []), _images(row)
        if images:
            candidates, numbers = numbers[:MOST_COMPARED], []
            # The image of another row may be damaged, or an array that does not compare.
            with suppress(Exception):
                numbers = [n for n in candidates if _images(self.rows[n]) == images]
        return f"row {numbers[0]} of `train_dataset`" if numbers else f"the row {row!r:.80}"

    @cached_property
    def _numbers(self) -> dict[int, list[int]]:
        """Map a hash of a training row's columns, images excluded, to row numbers; {} for a stream."""
        known, numbers = self.rows if hasattr(self.rows, "__len__") else [], defaultdict(list)
        if isinstance(known, Dataset):
            known = known.select_columns([c for c in known.column_names if c not in IMAGE_COLUMNS])
        for number, row in enumerate(known):
            numbers[_words(row)].append(number)
        return numbers

    def finish(self, raw: Raw, seed: tuple[int, ...], sums: Sums, **more: Any) -> Played:
        """Add environment types and metrics to episodes that an engine has played; not thread-safe."""
        # Reward functions see the class names of training's environments, also in an evaluation.
        for episode in raw.episodes:
            episode.env_type = self.engine.drivers[episode.name].type_name
        _count_cut_off_as_failed(raw.episodes)
        rewrites = any(driver.calls_model for driver in self.engine.drivers.values())
        rewrites |= self.engine.limits.max_images is not None
        more |= {"has_logprobs": self.sampler.tells_logprobs, "has_contexts": rewrites}
        return Played(*raw[:3], seed, sums=sums, **more)

    def _play_by_func(
        self,
        func: Callable[[list[Any]], Any],
        rows: list[Row],
        names: list[EpisodeKey] | None,
        repeated: frozenset[int],
    ) -> Played:
        prompts = [row["prompt"] for row in rows]
        output = func(copy.deepcopy(prompts))
        read, ends = partial(read_message, self.renderer), [*self.renderer.eos_token_ids]
        episodes, columns = read_rollout(output, rows, prompts, ends, read)
        for episode in episodes:
            for key, values in columns.items():
                if not isinstance(values, list):
                    rows[episode.row][key] = values
                elif episode.row < len(values):
                    rows[episode.row][key] = values[episode.row]
        return Played(
            rows,
            episodes,
            Durations(),
            None,
            has_logprobs=output["logprobs"] is not None,
            names=names,
            repeated=repeated,
            has_contexts=output.get("episode_of") is not None,
        )

    def collate(self, rollout: Played) -> Tokens:
        """Convert a rollout's tokens to tensors on the device, with a row per context."""
        ended, pad = rollout.ended(self.end_ids), self.renderer.tokenizer.pad_token_id
        contexts = [context for _, context in rollout.contexts]
        hidden = [self.hides_truncated and not ended[n] for n, _ in rollout.contexts]
        # An engine may need equally many rows on all processes.
        for _ in range(engine_of(self.accelerator).num_rows(len(contexts)) - len(contexts)):
            row = Context(prompt_ids=[pad], ids=[pad], action_mask=[False], logprobs=[0.0])
            contexts.append(row)
            hidden.append(False)
        reader = self.renderer.reader
        if reader is not None:
            reader.train_on(image for context in contexts for image in context.images)
        return collate(
            contexts,
            pad_token_id=pad,
            multiple_of=self.multiple_of,
            device=self.accelerator.device,
            has_logprobs=rollout.has_logprobs,
            hidden=hidden,
            sees=reader is not None,
        )


def _words(row: Row) -> int:
    return hash(repr({name: value for name, value in row.items() if name not in IMAGE_COLUMNS}))


def _images(row: Row) -> list[Any]:
    return [row[name] for name in IMAGE_COLUMNS if row.get(name) is not None]


def play_rows(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    backend: Backend,
    inputs: list[Row],
    seed: tuple[int, ...],
    *,
    owns_prompts: bool,
    first_row: int = 0,
    names: Sequence[EpisodeKey] | None = None,
    label: Callable[[int], str] | None = None,
) -> Raw:
    """Play one episode per row, thread-safe.

    For the other arguments see `RolloutEngine.run`; with `owns_prompts` rows may lack a prompt.
    """
    failure: Exception | None = None
    played: tuple[list[Episode], Durations] = [], Durations()
    rows = inputs
    try:
        sees, tokenizer = renderer.reader is not None, renderer.tokenizer
        rows, ids = rows_with_prompts(inputs, tokenizer, owns_prompts=owns_prompts, sees=sees)
        prompts = [row["prompt"] for row in rows]
        if ids is None and not (all(prompts) or owns_prompts):
            # The rows of a stream are unchecked until here.
            row = next(row for row in rows if not row["prompt"])
            raise ValueError(f"`prompt` is empty in the row {row!r:.80}.")
        played = engine.run(inputs, prompts, renderer, backend, seed, first_row, names, ids, label)
    except (EnvironmentFailureError, NonFiniteError, RolloutError, ValueError) as error:
        failure = error
    return Raw(rows, *played, failure)


def seed_batch(seed: tuple[int, ...], names: Sequence[EpisodeKey]) -> None:
    """Seed the global random generators, which `generate` and environments may use, for named episodes."""
    set_seed(turn_random((*seed, *names[0])).getrandbits(32))


def _count_cut_off_as_failed(episodes: Sequence[Episode]) -> None:
    """Mark episodes that ran out of turns or tokens as failed, if their environments judge episodes."""
    reporting = sorted({str(e.env_type) for e in episodes if e.success is not None})
    every = {kind for kinds in gather_object([reporting]) for kind in kinds}
    for episode, success in zip(episodes, cut_off_as_failed(episodes, every), strict=True):
        episode.success = success


def raise_first(local: Exception | None) -> None:
    """Raise one process's error on all processes; with several, a ValueError becomes a RolloutError."""
    if local is not None and PartialState().num_processes == 1:
        raise local
    # Pickling a subclass of ValueError may fail.
    sent = RolloutError(described(local)) if isinstance(local, ValueError) else local
    for error in gather_object([sent]):
        if error is not None:
            raise error
