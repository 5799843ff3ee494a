"""Records a few episodes of every update, with the update's values for each of their tokens.

The first rows of a process's rollout batch are recorded. Mini-batches are shuffled in every epoch, so
each row has its number as a column; the passes of the update store values by that number in tables on
the device, which are copied to the host once, when the update is over. Recording draws no random
numbers, does not change training's computation, and a failure in it does not end the training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import TrainerCallback

from ..core import ClippedSurrogate
from ..rollout.engine import RolloutEngine
from ..rollout.images import Image, told
from ..trace.files import DIGITS, FOLDER, TracedUpdate, next_start, write_update
from .batch import MiniBatch, UpdateData
from .loop.player import EpisodePlayer
from .loop.rollout import Played, Scored
from .ppo_config import PPOConfig

logger = logging.getLogger(__name__)

# Largest number of characters between the texts of two tokens: spaces, or a character of several tokens.
GAP = 32
# Limits of a text, and of all images of a record.
MAX_CHARACTERS, MOST_IMAGE_CHARACTERS = 100_000, 2**20
SHORT = 200
# Per-token field -> columns of its mask and of its values. A value off the mask is None.
FIGURES = {
    "old_logprobs": ("sampled", "old_per_token_logps"),
    "token_log_ratio": ("seen", "difference"),
    "log_ratio": ("seen", "log_ratio"),
    "advantages": ("loss_mask", "advantages"),
    "values": ("sampled", "values"),
    "returns": ("value_mask", "returns"),
    "clipped": ("seen", "clipped"),
}
COLUMNS = ("turn_index", "loss_mask", "advantages", "old_per_token_logps")
OF_CRITIC = ("values", "returns", "value_mask")


def cut(ids: Sequence[int], decode: Callable[[list[int]], str], backend: Any) -> list[str]:
    """Return one piece of text per token. The joined pieces are the decoded text, for any tokenizer.

    A token that completes no character gets ""; the last piece gets the rest. `decode` keeps special
    tokens and does not clean up; `backend` is the tokenizer of `tokenizers`, if any.
    """
    text, pieces, done = decode(list(ids)), [], 0
    stream = DecodeStream(skip_special_tokens=False)
    for token in ids:
        try:
            piece = decode([token]) if backend is None else stream.step(backend, token)
        except Exception:
            # Some decoders change earlier text, for example after half a character, so begin a new stream.
            stream = DecodeStream(skip_special_tokens=False)
            piece = stream.step(backend, token)
        piece = piece or ""
        found = text.find(piece, done, done + len(piece) + GAP)
        upto = done if found < 0 else found + len(piece)
        pieces.append(text[done:upto])
        done = upto
    if pieces:
        pieces[-1] += text[done:]
    return pieces


def row_pieces(
    tokenizer: Any, ids: Sequence[int], images: Sequence[Image], extents: Sequence[tuple[int, int]]
) -> list[str]:
    """Return one piece of text per token of a row; the last token of an image describes the image."""
    whole = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pieces = cut(ids, partial(tokenizer.decode, **whole), backend)
    for image, (start, end) in zip(images, extents, strict=True):
        pieces[start:end] = [*[""] * (end - start - 1), str(image)]
    return pieces


def thumbnails(images: Sequence[Image], starts: Sequence[int], turns: Sequence[int]) -> list[list[str]]:
    """Return a row's images as `data:` URLs, by the number of turns before them; "" beyond the limit.

    `starts`: where the images begin in the row; `turns`: where the turns begin.
    """
    found: list[list[str]] = [[] for _ in range(len(turns) + 1)]
    left = MOST_IMAGE_CHARACTERS
    for image, start in zip(images, starts, strict=True):
        url = image.thumbnail()
        left -= len(url)
        found[bisect(turns, start)].append(url if left >= 0 else "")
    return found


@dataclass
class OpenRecord:
    """Unfinished record of a rollout batch and its update, or of an evaluation."""

    header: dict[str, Any]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    batch: dict[str, Tensor] = field(default_factory=dict)
    passes: dict[str, Tensor] = field(default_factory=dict)
    outcomes: list[tuple[str, Tensor]] = field(default_factory=list)


class TraceRecorder(TrainerCallback):
    """Records this process's share of the `trace_episodes` episodes of each update.

    `run`: `trainer`, `variant` and `level` of the run. `reward_names`: names of its reward functions.
    """

    def __init__(
        self,
        args: PPOConfig,
        player: EpisodePlayer,
        tokenizer: Any,
        accelerator: Any,
        *,
        run: dict[str, Any],
        reward_names: list[str],
        has_critic: bool,
    ) -> None:
        self._player, self._tokenizer, self._accelerator = player, tokenizer, accelerator
        self._run, self._reward_names = run, reward_names
        self._columns = (*COLUMNS, *OF_CRITIC) if has_critic else COLUMNS
        self._folder = Path(args.output_dir) / FOLDER
        self._steps_per_rollout = args.steps_per_rollout
        share, rest = divmod(args.trace_episodes, accelerator.num_processes)
        self._share = share + (accelerator.process_index < rest)
        self._update: OpenRecord | None = None
        self._evaluation: OpenRecord | None = None
        self._start, self._step = 0, 0
        self._first_step: int | None = None
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the training a number, so that readers drop earlier records of the steps that it repeats."""
        start = 0
        self._step = state.global_step
        if self._accelerator.is_main_process:
            with self._harmless():
                start = next_start(self._folder)
        self._start = gather_object([start])[0]
        self._first_step = self._step

    def rollout(self, rollout: Played, scored: Scored, batch: UpdateData, step: int) -> None:
        """Begin the record of the rollout at optimizer step `step`."""
        if not self._share:
            return
        self._update, self._step = None, step
        with self._harmless():
            numbers = range(len(rollout.episodes))[: self._share]
            records = self._begun(rollout, scored, numbers, self._player.engine)
            # The first rows of the batch are the contexts of the first episodes.
            columns: dict[str, Any] = dict(batch)
            kept = {n: columns[n][: len(records)].clone() for n in self._columns if n in columns}
            self._update = OpenRecord(self._header("train", "train"), records, kept)

    def observe(
        self,
        inputs: UpdateData,
        logprobs: Tensor,
        old_logprobs: Tensor,
        log_ratio: Tensor,
        surrogate: ClippedSurrogate,
    ) -> None:
        """Record a micro-batch's pass through the policy."""
        if self._update is None:
            return
        # Detach the record, so that a failure below drops it.
        record, self._update = self._update, None
        with self._harmless():
            figures = {"logprobs": logprobs, "log_ratio": log_ratio}
            figures |= {"clipped": surrogate.is_clipped, "seen": inputs["loss_mask"]}
            if "old_per_token_logps" not in record.batch:
                figures["old_per_token_logps"] = old_logprobs
            if "episode_weights" in inputs:
                figures["weight"] = inputs["episode_weights"][:, None].expand_as(logprobs)
            # The last row of the tables takes the values of rows that are not recorded.
            size, length = len(record.episodes), record.batch["turn_index"].size(1)
            rows = inputs["row"].clamp(max=size)
            for name, values in figures.items():
                if name not in record.passes:
                    record.passes[name] = values.new_zeros(size + 1, length)
                table = record.passes[name]
                table[rows, : values.size(1)] = values.detach().to(table.dtype)
            self._update = record

    def end_mini_batch(self, mini_batch: MiniBatch, *, outcome: str, is_last: bool) -> None:
        """Record the outcome of an optimizer step; write the update after its last step."""
        if self._update is None:
            return
        with self._harmless():
            self._update.header["clip_range"] = [*mini_batch.clip_range]
            steps = self._update.header["steps"]
            steps[outcome] = steps.get(outcome, 0) + 1
            rows = torch.cat([part["row"] for part in mini_batch.parts])
            self._update.outcomes.append((outcome, rows))
        if is_last:
            self._update.header["complete"] = True
            self.finish()

    def finish(self) -> None:
        """Write the open update's record, if there is one."""
        record, self._update = self._update, None
        self._write(record)

    def evaluated(self, rollout: Played, scored: Scored, prefix: str, step: int) -> None:
        """Record episodes of an evaluation batch, until this process has recorded its share."""
        if not self._share:
            return
        self._step = step
        with self._harmless():
            if self._evaluation is None:
                self._evaluation = OpenRecord(self._header("eval", prefix))
            room = self._share - len(self._evaluation.episodes)
            numbers = [n for n in range(len(rollout.episodes)) if n not in rollout.repeated][:room]
            records = self._begun(rollout, scored, numbers, self._player.eval_engine)
            self._evaluation.episodes += self._complete(records, {}, {})

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the record of a completed evaluation."""
        record, self._evaluation = self._evaluation, None
        self._write(record)

    def _begun(
        self, rollout: Played, scored: Scored, numbers: Sequence[int], engine: RolloutEngine
    ) -> list[dict[str, Any]]:
        """Return records of some episodes, one per context, with the values known before the update.

        A record's `ids` has the ids of prompt and completion, and the images of both.
        """
        first = self._accelerator.process_index * len(rollout.episodes)
        scores, by_turn, records = scored.rewards.tolist(), scored.turn_rewards, []
        totals = scored.totals
        for number in numbers:
            episode = rollout.episodes[number]
            row, versions = rollout.rows[episode.row], episode.policy_versions
            # In an evaluation the key is the row of the data set, and the repetition.
            key = [first + number] if rollout.names is None else [*rollout.names[number]]
            rewards = zip(self._reward_names, scores[number], strict=True)
            record = {
                "row": key[0],
                "repetition": key[1] if len(key) > 1 else 0,
                "prompt_id": _prompt_id(row),
                "columns": _short_columns(row),
                "seed": None if rollout.seed is None else [*rollout.seed, *key],
                "score": totals[number],
                "rewards": {name: None if math.isnan(value) else value for name, value in rewards},
                "success": episode.success,
                "terminated": episode.terminated,
                "stop_reason": None if episode.stop_reason is None else str(episode.stop_reason),
                "error": _plain(episode.error),
                "trains": episode.trains,
                "contexts": len(episode.contexts),
                "prompt": _plain(told(episode.prompt)),
                "messages": _plain(told(episode.messages)),
            }
            # A `rollout_func` has no driver.
            if rollout.seed is not None:
                driver = engine.drivers[episode.name]
                record["environment"] = episode.name or driver.type_name
                record["observations"] = "tool" if driver.tools else "environment"
                record["pictures"] = _plain(episode.pictures) if any(episode.pictures) else None
            for at, context in enumerate(episode.contexts):
                turns = context.turns
                own: dict[str, Any] = {
                    "context": at,
                    "ids": [context.prompt_ids, context.ids, context.images],
                    "turn_spans": context.turn_spans,
                    "turns": turns if episode.more else None,
                    "turn_rewards": by_turn and [by_turn[number][turn] for turn in turns],
                    "policy_versions": [versions[turn] for turn in turns] if versions else None,
                }
                records.append(record | own)
        return records

    def _complete(
        self, records: list[dict[str, Any]], batch: dict[str, Tensor], passes: dict[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Add tokens and per-token values to records, from their rows of the rollout batch, [N, T].

        `passes` has values of the last pass over these rows, [N or more, T]: `logprobs`, `log_ratio`,
        `clipped`, the episode's `weight`, and `seen`, whether there was a pass; {} without a pass. It has
        the old log-probabilities, too, if the batch lacks them.
        """
        # This copy is the only synchronisation with the device.
        table = {name: tensor.cpu()[: len(records)] for name, tensor in (batch | passes).items()}
        if "turn_index" in table:
            table["sampled"] = table["turn_index"] >= 0
        figures = dict(FIGURES)
        if "old_per_token_logps" in passes:
            figures["old_logprobs"] = ("seen", "old_per_token_logps")
        if "logprobs" in table:
            table["difference"] = table["logprobs"].double() - table["old_per_token_logps"].double()
        columns = {name: [*map(_rounded, tensor.tolist())] for name, tensor in table.items()}
        reader = self._player.renderer.reader
        for number, record in enumerate(records):
            prompt, ids, images = record.pop("ids")
            row = [*prompt, *ids]
            record |= {"token_ids": row, "prompt_tokens": len(prompt)}
            extents = reader.extents(row, images) if reader is not None else []
            record["pieces"] = row_pieces(self._tokenizer, row, images, extents)
            if images:
                turns = [len(prompt) + start for start, _ in record["turn_spans"]]
                record["image_spans"] = extents
                record["images"] = thumbnails(images, [start for start, _ in extents], turns)
            own = {name: rows[number][: len(ids)] for name, rows in columns.items()}
            record["loss_mask"] = own.get("loss_mask")
            for name, (mask, values) in figures.items():
                if mask in own and values in own:
                    pairs = zip(own[mask], own[values], strict=True)
                    record[name] = [value if there else None for there, value in pairs]
            if "weight" in own and any(own["seen"]):
                record["weight"] = own["weight"][0]
        return records

    def _header(self, phase: str, name: str) -> dict[str, Any]:
        return {
            "phase": phase,
            "name": name,
            "update": self._step // self._steps_per_rollout + (phase == "train"),
            "global_step": self._step,
            "process": self._accelerator.process_index,
            **self._run,
            "steps": {},
            "complete": phase == "eval",
        }

    def _write(self, record: OpenRecord | None) -> None:
        if record is None or not record.episodes:
            return
        with self._harmless():
            episodes = record.episodes
            if record.header["phase"] == "train":
                self._complete(episodes, record.batch, record.passes)
                outcomes = [(name, rows.tolist()) for name, rows in record.outcomes]
                for row, episode in enumerate(episodes):
                    episode["steps"] = Counter(name for name, rows in outcomes if row in rows)
            start = {"start": self._start, "first_step": self._first_step}
            about = {**record.header, **start, "episodes": len(episodes)}
            write_update(self._folder, TracedUpdate.from_json(about), episodes)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Context manager that turns exceptions into a warning: a failed record does not end the run."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "The episodes of step %d were not recorded: %s: %s. Training goes on.",
                    self._step, type(error).__name__, error,
                )  # fmt: skip
            logger.debug("recording failed", exc_info=True)
            self._warned = True


def _plain(value: Any) -> Any:
    """Return plain JSON data whose texts have at most `MAX_CHARACTERS`."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    finite = isinstance(value, float) and math.isfinite(value)
    if value is None or isinstance(value, (bool, int)) or finite:
        return value
    text, left_out = str(value), len(str(value)) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}[{left_out} more characters]"


def _prompt_id(row: Mapping[str, Any]) -> str:
    """Return the row's `id`, else a hash of its prompt."""
    if row.get("id") is not None:
        return str(_plain(row["id"]))
    prompt = json.dumps(row.get("prompt"), default=str)
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def _short_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the short columns of the row, without its prompt."""
    some = {name: _plain(value) for name, value in row.items() if name not in ("prompt", "id")}
    some = {name: value for name, value in some.items() if value not in (None, "", [])}
    return {name: value for name, value in some.items() if len(json.dumps(value)) <= SHORT}


def _rounded(values: Sequence[float | bool | None]) -> list[float | bool | None]:
    """Round numbers to `DIGITS` significant digits."""
    return [float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for v in values]
