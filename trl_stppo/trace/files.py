"""Trace files: one compressed JSONL per update and process, such as `trace/train-0000012-rank0.jsonl.gz`.

The first line is the update, each other line an episode. Files are written atomically; an update that is
repeated replaces its file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import TraceError

logger = logging.getLogger(__name__)

FOLDER = "trace"
ENDING = ".jsonl.gz"
# Level of gzip: level 6 takes almost three times as long and saves 6%.
COMPRESSION = 4
# Increase this number if older package versions would misread a file, not for new fields.
VERSION = 1

PER_TOKEN = (
    *("loss_mask", "old_logprobs", "token_log_ratio", "log_ratio"),
    *("advantages", "values", "returns", "clipped"),
)
# Digits of a recorded per-token value; more digits would double the file.
DIGITS = 6
# Errors of a file that is cut off or is no trace.
_DAMAGE = (OSError, zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError)

Figures = list[float | None] | None


@dataclass(frozen=True)
class TracedUpdate:
    """Record of one rollout batch and its update, or of one evaluation.

    Attributes:
        phase: "train" or "eval".
        name: "train", or the prefix of an evaluation's figures.
        update: number of the rollout batch, from 1; in an evaluation, number of past updates.
        global_step: optimizer steps before the episodes.
        start: number of the (perhaps resumed) training in the folder, from 1; 0 outside of training.
        first_step: optimizer steps before this training; None for an evaluation outside of training.
        level: level of the importance ratio: "token", "turn" or "sequence".
        clip_range: distances of the clip bounds below and above 1.
        steps: optimizer steps of this update by verdict (`trainer.step.Verdict`).
    """

    phase: str
    name: str
    update: int
    global_step: int
    process: int = 0
    start: int = 0
    first_step: int | None = None
    trainer: str = ""
    variant: str | None = None
    level: str = "token"
    clip_range: list[float] = field(default_factory=lambda: [0.2, 0.2])
    steps: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    episodes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dictionary for the first line of a trace file."""
        return {"version": VERSION, **vars(self)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> TracedUpdate:
        """Make a record from a dictionary of `to_json`. Unknown fields are ignored."""
        return cls(**_known(cls, line))


@dataclass(frozen=True)
class TracedEpisode:
    """Record of one episode: its texts, per-token values, rewards and outcome.

    Attributes:
        row: index in the rollout batch over all processes, or in the dataset of an evaluation.
        repetition: number of the row's repetition, in an evaluation.
        prompt_id: the row's `id` column, else a hash of its prompt.
        columns: short columns of the row besides its prompt, for example the right answer.
        seed: seed of its random numbers; None without the rollout engine.
        pieces: text of each token, prompt included; together they are the text. If several tokens form
            a character, all except the last are "".
        turn_spans: per turn half-open offsets from the first token after the prompt.
        context, contexts: number of this context in the episode, and their count.
        turns: number in the episode of each turn of this context; None if there is one context.
        observations: "environment" or "tool", the source of the text between turns.
        loss_mask: per token whether it is in the loss.
        old_logprobs: log-probabilities of the sampling policy, nats.
        token_log_ratio, log_ratio: difference of the log-probabilities at the last update and
            `old_logprobs`, per token and at the ratio's level, nats.
        values, returns: values of the critic before the update, and its targets.
        clipped: whether the clip removed the token's gradient in the last pass.
        weight: weight of the episode in the last pass, by `stabilizers`; None for 1.
        policy_versions: per turn the optimizer steps of the sampling policy; None if it is the trained
            policy.
        steps: passes over the episode by outcome, as in `TracedUpdate.steps`.
        score: sum of all rewards, as in `episode/score`.
        terminated: whether the task ended by itself, and was not cut off.
        trains: whether the episode is in the loss.
        prompt, messages: the conversation before and after the beginning of the first turn.
        pictures: text or SVG of the environment after `reset` and after each turn; None without pictures.
        image_spans: half-open offsets in `pieces` of the images that the policy read.
        images: these images as `data:` URLs, before the first turn and after each turn of this context; ""
            for one that is left out because the record is full. None without images.
    """

    update: TracedUpdate
    row: int
    repetition: int = 0
    prompt_id: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    seed: list[int] | None = None
    environment: str | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    context: int = 0
    contexts: int = 1
    turns: list[int] | None = None
    observations: str = "environment"
    loss_mask: list[bool] | None = None
    old_logprobs: Figures = None
    token_log_ratio: Figures = None
    log_ratio: Figures = None
    advantages: Figures = None
    values: Figures = None
    returns: Figures = None
    clipped: list[bool | None] | None = None
    weight: float | None = None
    policy_versions: list[int] | None = None
    steps: dict[str, int] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    score: float | None = None
    success: bool | None = None
    terminated: bool | None = None
    stop_reason: str | None = None
    error: str | None = None
    trains: bool = True
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    pictures: list[str | None] | None = None
    image_spans: list[tuple[int, int]] = field(default_factory=list)
    images: list[list[str]] | None = None

    @property
    def key(self) -> str:
        """Return the episode's name in the run: train-12-3, eval-40-3.0, or train-12-3-c1 for context 1."""
        context = f"-c{self.context}" if self.context else ""
        if self.update.phase == "train":
            return f"train-{self.update.update}-{self.row}{context}"
        step, row = self.update.global_step, f"{self.row}.{self.repetition}"
        return f"{self.update.name}-{step}-{row}{context}"

    @property
    def text(self) -> str:
        """Return the text of prompt and completion, special tokens included."""
        return "".join(self.pieces)

    def to_json(self) -> dict[str, Any]:
        """Return the episode as a dictionary for one line of a trace file."""
        return {name: value for name, value in vars(self).items() if name != "update"}

    @classmethod
    def from_json(cls, line: Mapping[str, Any], update: TracedUpdate) -> TracedEpisode:
        """Make an episode from a dictionary of `to_json`. Unknown fields are ignored."""
        known = {**_known(cls, line), "update": update}
        known["turn_spans"] = [(start, end) for start, end in known.get("turn_spans", ())]
        return cls(**known)


def write_update(folder: Path, update: TracedUpdate, episodes: Iterable[dict[str, Any]]) -> Path:
    """Write the trace file of an update atomically. Episodes are dictionaries of `TracedEpisode.to_json`."""
    lines = [_dumps(update.to_json()), *(_dumps(episode) for episode in episodes)]
    content = gzip.compress("".join(lines).encode("ascii"), COMPRESSION, mtime=0)
    name = re.sub(r"[^\w.-]", "_", update.name)
    number = update.update if update.phase == "train" else update.global_step
    path = folder / f"{name}-{number:07d}-rank{update.process}{ENDING}"
    aside = folder / f".{path.name}.{os.getpid()}.writing"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _dumps(line: dict[str, Any]) -> str:
    # ASCII keeps invalid text, such as half of a surrogate pair.
    return json.dumps(line, separators=(",", ":"), default=str) + "\n"


def read_trace(folder: str | Path) -> Iterator[TracedEpisode]:
    """Read the episodes of a run in the order of play, one at a time.

    Updates that a resumed or restarted run repeats are read once, in their latest form. Damaged parts
    are left out with a warning.

    Args:
        folder: the run's `output_dir`, or the trace folder in it.

    Raises:
        TraceError: there is no trace, or a newer version of this package has written it.
    """
    # Read the headers now, so that errors are raised here and not with the first episode.
    updates = read_updates(folder)
    return (episode for head, path in updates for episode in read_episodes(head, path))


def read_updates(folder: str | Path) -> list[tuple[TracedUpdate, Path]]:
    """Return the updates of a run, in order, with their trace files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TraceError(f"`{folder}` is no folder; must be the `output_dir` of a run.")
    found = _read_headers(folder / FOLDER) or _read_headers(folder)
    if not found:
        raise TraceError(f"`{folder}` holds no readable trace; the option `trace_episodes` records episodes.")
    starts = {(update.start, update.first_step) for update, _ in found}
    latest = [entry for entry in found if not _is_superseded(entry[0], starts)]

    def order(entry: tuple[TracedUpdate, Path]) -> tuple[Any, ...]:
        # An evaluation at step 8 comes before the rollout at step 8.
        head = entry[0]
        return head.global_step, head.phase == "train", head.update, head.name, head.process

    return sorted(latest, key=order)


def next_start(folder: Path) -> int:
    """Return the number for a new training: one more than the highest recorded number."""
    return 1 + max((update.start for update, _ in _read_headers(folder)), default=0)


def read_episodes(update: TracedUpdate, path: Path, **options: Any) -> Iterator[TracedEpisode]:
    """Yield the undamaged episodes of a trace file. `options` are arguments of `json.loads`."""
    read = 0
    reason: Exception = EOFError("the file has lost its end")
    for line in _lines(path)[1:]:
        try:
            episode = TracedEpisode.from_json(json.loads(line, **options), update)
        except _DAMAGE as error:
            reason = error
        else:
            read += 1
            yield episode
    if (lost := update.episodes - read) > 0:
        logger.warning(
            "A part of %s is damaged and left out: %d of %d episodes (%s: %s).",
            path, lost, update.episodes, type(reason).__name__, reason,
        )  # fmt: skip


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a trace file, even if its end is missing. Raise an error for other damage."""
    text = zlib.decompressobj(wbits=31).decompress(path.read_bytes())
    return text.removesuffix(b"\n").split(b"\n")


def _read_headers(folder: Path) -> list[tuple[TracedUpdate, Path]]:
    found = []
    for path in sorted(folder.glob(f"*{ENDING}")):
        try:
            line = json.loads(_lines(path)[0])
            if line["version"] > VERSION:
                raise TraceError(
                    f"`{path}`: format version is {line['version']}, must be <= {VERSION}. Update trl-stppo."
                )
            found.append((TracedUpdate.from_json(line), path))
        except TraceError:
            raise
        except _DAMAGE as error:
            logger.warning("%s is damaged and left out (%s: %s).", path, type(error).__name__, error)
    return found


def _is_superseded(update: TracedUpdate, starts: Iterable[tuple[int, int | None]]) -> bool:
    """Return whether a later (resumed) training of the run has repeated this update."""
    step = update.global_step - (update.phase == "eval")
    return any(
        start > update.start and first_step is not None and step >= first_step for start, first_step in starts
    )


def _known(cls: type, line: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: line[f.name] for f in fields(cls) if f.name in line}
