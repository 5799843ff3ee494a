"""What is recorded of an episode and of the update that it belongs to, and its form as JSON.

Per-token lists have one entry per token after the prompt; None where a figure does not exist. Numbers
that are not finite are the strings "NaN", "Infinity" and "-Infinity", which JSON has no numbers for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

FORMAT = "trl-stppo-trace"
# Raised when a reader of an older version would misread a file; new fields do not raise it.
VERSION = 1

# Per-token figures of an episode.
FIGURES = (
    *("old_logprobs", "token_log_ratio", "log_ratio"),
    *("advantages", "values", "returns"),
)
PER_TOKEN = ("turn_index", "loss_mask", "clipped")
# Digits of a recorded per-token figure; more would double the file and tell nobody anything.
DIGITS = 6

Figures = list[float | None] | None


@dataclass(frozen=True)
class TracedUpdate:
    """The rollout batch and its update, or the evaluation, that episodes belong to.

    Attributes:
        phase: "train" or "eval".
        name: "train", or the prefix of an evaluation's figures.
        update: number of the rollout batch, from 1; in an evaluation, updates done so far.
        global_step: optimizer steps taken when the episodes were played.
        process, processes: who recorded, of how many.
        start: number of the (perhaps resumed) training among all that were recorded in the folder,
            from 1; 0 where that was not written down yet.
        started: when it began, in seconds since 1970.
        first_step: optimizer steps taken then; None for an evaluation outside of training.
        trainer, variant: of the run.
        level: of the importance ratio: "token", "turn" or "sequence".
        clip_range: how far below and above 1 a ratio may go.
        steps: optimizer steps of this update by outcome: "taken", "critic_only" (warm-up of the
            critic), "target_kl", "not_finite" and "empty" (left out by a guard).
        complete: whether the update came to its end.
        episodes: how many are in the file.
        figures: metrics of the whole batch by name, those of the last optimizer step among them.
    """

    phase: str
    name: str
    update: int
    global_step: int
    process: int = 0
    processes: int = 1
    start: int = 0
    started: float = 0.0
    first_step: int | None = None
    trainer: str = ""
    variant: str | None = None
    level: str = "token"
    clip_range: tuple[float, float] = (0.2, 0.2)
    steps: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    episodes: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The first line of a file."""
        figures = {name: as_json(value) for name, value in self.figures.items()}
        numbers = {"clip_range": [as_json(bound) for bound in self.clip_range], "figures": figures}
        return {"format": FORMAT, "version": VERSION, **asdict(self), **numbers}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> TracedUpdate:
        """Read `to_json` back; fields of a later version are passed over.

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: some of it is none of ours.
        """
        known = _known(cls, line)
        known["start"] = int(known.get("start", 0))
        known["clip_range"] = tuple(map(float, known.get("clip_range", (0.2, 0.2))))
        known["figures"] = {k: float(v) for k, v in known.get("figures", {}).items()}
        return cls(**known)


@dataclass(frozen=True)
class TracedEpisode:
    """One episode with everything that the update made of it.

    Attributes:
        update: where it belongs.
        row: of the rollout batch over all processes; of the dataset in an evaluation.
        repetition: of the row, in an evaluation.
        prompt_id: the row's `id` column, else a hash of its prompt.
        columns: of the row, the short ones besides its prompt: the right answer, for one.
        seed: names its randomness; None where the rollout engine did not play it.
        environment: class name, or name of the factory; None without.
        pieces: text of each token, the prompt's first; together they are the text. A token that is
            but a part of a character is "", and the last of them has the character.
        token_ids: likewise.
        prompt_tokens: how many of them are the prompt.
        turn_spans: per turn half-open offsets from the first token after the prompt.
        observations: "environment" or "tool", who says what is between the turns.
        turn_index: per token the turn that it trains in, -1 outside.
        loss_mask: per token whether it is in the loss.
        old_logprobs: log-probability when sampled, nats.
        token_log_ratio, log_ratio: log-probability at the last update minus when sampled, of the token and
            at the level in use, nats.
        advantages: as they enter the loss.
        values, returns: of the critic, before the update, and what it was to learn.
        clipped: whether the clip stopped the token's gradient in the last pass over it.
        weight: of the episode in the last pass over it, what `stabilizers` made of it; None for 1.
        policy_versions: per turn the optimizer steps that the policy had taken which sampled it; None
            where the policy that is trained samples itself.
        steps: passes over the episode by outcome, as in `TracedUpdate.steps`.
        turn_rewards: what each turn earned; None where turns are not paid.
        rewards: of each reward function.
        score: all rewards together, as in `episode/score`.
        success: None where the environment does not say.
        terminated, truncated: the task's own end, or a cut-off.
        stop_reason: in words; None where the rollout engine did not play.
        error: what went wrong in the environment, or where turns are sampled.
        trains: whether the episode may teach.
        prompt, messages: the conversation before and after the first turn begins.
    """

    update: TracedUpdate
    row: int
    repetition: int = 0
    prompt_id: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    seed: tuple[int, ...] | None = None
    environment: str | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    observations: str = "environment"
    turn_index: list[int] | None = None
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
    truncated: bool | None = None
    stop_reason: str | None = None
    error: str | None = None
    trains: bool = True
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None

    @property
    def key(self) -> str:
        """Names the episode within its run: train-12-3, eval-40-3.0."""
        if self.update.phase == "train":
            return f"train-{self.update.update}-{self.row}"
        return f"{self.update.name}-{self.update.global_step}-{self.row}.{self.repetition}"

    @property
    def text(self) -> str:
        """Prompt and completion, special tokens included."""
        return "".join(self.pieces)

    @property
    def roles(self) -> list[str]:
        """Per token "prompt", "turn 0", "turn 1", ..., or who says what is between the turns."""
        roles = [self.observations] * (len(self.pieces) - self.prompt_tokens)
        for turn, (start, end) in enumerate(self.turn_spans):
            roles[start:end] = [f"turn {turn}"] * (end - start)
        return ["prompt"] * self.prompt_tokens + roles

    def to_json(self) -> dict[str, Any]:
        """One line of a file."""
        line = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "update"}
        for name in FIGURES:
            line[name] = _as_json(line[name])
        line["score"] = as_json(self.score)
        line["rewards"] = {name: as_json(value) for name, value in self.rewards.items()}
        if self.turn_rewards is not None:
            line["turn_rewards"] = [as_json(value) for value in self.turn_rewards]
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any], update: TracedUpdate) -> TracedEpisode:
        """Read `to_json` back, as `TracedUpdate.from_json`."""
        known = _known(cls, line)
        for name in (*FIGURES, "turn_rewards"):
            known[name] = _floats(known.get(name))
        known["score"] = _float(known.get("score"))
        known["rewards"] = {k: _float(v) for k, v in known.get("rewards", {}).items()}
        known["turn_spans"] = [(start, end) for start, end in known.get("turn_spans", [])]
        if known.get("seed") is not None:
            known["seed"] = tuple(known["seed"])
        episode = cls(**{**known, "update": update})
        episode._check_lengths()
        return episode

    def _check_lengths(self) -> None:
        length = len(self.pieces) - self.prompt_tokens
        per_token = {name: getattr(self, name) for name in (*FIGURES, *PER_TOKEN)}
        wrong = [name for name, x in per_token.items() if x is not None and len(x) != length]
        if len(self.token_ids) != len(self.pieces) or not self.prompt_tokens >= 0:
            wrong.append("pieces")
        if any(not 0 <= start <= end <= length for start, end in self.turn_spans):
            wrong.append("turn_spans")
        if wrong:
            raise ValueError(f"`{wrong[0]}` is of another length than the episode")


def as_json(value: float | None) -> float | str | None:
    """A number that JSON can hold."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _as_json(values: Sequence[float | None] | None) -> Sequence[float | str | None] | None:
    """Per-token figures; nearly always there is nothing to replace."""
    known = filter(None, values or ())
    return values if all(map(math.isfinite, known)) else [as_json(v) for v in values or ()]


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _floats(values: Sequence[Any] | None) -> Any:
    return None if values is None else [_float(value) for value in values]


def _known(cls: type, line: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: line[f.name] for f in fields(cls) if f.name in line}
