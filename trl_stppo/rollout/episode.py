"""One episode: append-only rows of tokens, and the data of its turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .chat import Message
from .images import Image
from .record import FAILURES, StopReason


@dataclass(frozen=True)
class Limits:
    """Budgets of one episode. A budget of None is unlimited.

    Attributes:
        max_completion_tokens: all tokens after the prompt, observations included.
        max_turns: turns; the environment still plays the last turn.
        max_turn_tokens: sampled tokens of one turn.
        max_context_tokens: prompt and completion together, the model's context.
        max_tool_rounds: turns whose tool calls are executed.
        max_images: images of one context. More images open a context without the oldest images.
        env_timeout_seconds: one call into the environment.
    """

    max_completion_tokens: int
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_context_tokens: int | None = None
    max_tool_rounds: int | None = None
    max_images: int | None = None
    env_timeout_seconds: float | None = None


@dataclass
class Durations:
    """Durations of the parts of a rollout, in seconds.

    `environments` is summed over episodes; `waiting` is time without generation because every running
    episode was in its environment.
    """

    environments: float = 0.0
    waiting: float = 0.0
    generation: float = 0.0


@dataclass(kw_only=True, eq=False, repr=False)
class Context:
    """One append-only row of tokens: a prompt, and the turns and observations after it.

    Attributes:
        prompt_ids: tokens of the prompt.
        ids, action_mask, logprobs: the tokens after the prompt, one entry each: the id, whether the
            policy sampled it, and its sampling log-probability in nats (0.0 elsewhere). The loss uses
            `turn_spans`; `action_mask` is for counts, and for `tool_mask`.
        turn_spans: half-open token offsets of each turn.
        turns: number of each turn in its episode.
        images: images of the whole row, in the order of their tokens.
    """

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    def append_observation(self, ids: list[int]) -> None:
        """Append tokens that were not sampled: observations, and what joins contexts."""
        self.append(ids, False, [0.0] * len(ids))

    def append(self, ids: list[int], sampled: bool, logprobs: list[float]) -> None:
        """Append tokens, sampled by the policy or not."""
        self.ids += ids
        self.action_mask += [sampled] * len(ids)
        self.logprobs += logprobs
        if {len(self.action_mask), len(self.logprobs)} != {len(self.ids)}:
            raise RuntimeError(f"{self!r}: {len(logprobs)} logprobs for {len(ids)} tokens.")

    def room(self, limits: Limits) -> int:
        """Return the number of tokens that can still be appended within the limits."""
        room = limits.max_completion_tokens - len(self.ids)
        if limits.max_context_tokens is not None:
            context = len(self.prompt_ids) + len(self.ids)
            room = min(room, limits.max_context_tokens - context)
        return max(0, room)

    def turn_limit(self, limits: Limits) -> int:
        """Return the largest number of tokens that the next turn may have."""
        room = self.room(limits)
        return room if limits.max_turn_tokens is None else min(room, limits.max_turn_tokens)


@dataclass(eq=False, repr=False)
class Episode(Context):
    """One episode, from its data set row to its end. The inherited fields are its first context.

    Attributes:
        row: index of its row in the rollout; today each episode has its own row.
        prompt: the row's prompt, later with the environment's opening text.
        name: key of the environment factory, None for the single unnamed factory.
        env_type: class of the environment; "tools" for tools without an environment; None with neither.
        instance: number of its environment instance in the pool.
        env: the environment instance, None until `reset` has returned.
        current: the context of the next turn, None for the first context.
        opened: number of further contexts by reason.
        exchanges: per turn the messages before it and the turn, if an agent makes the calls.
        pictures: the environment's `render()` after `reset` and after each turn, None without a picture.
        turn_rewards: the environment's reward of each turn, of all contexts.
        turn_rewards_seen: entries of a tool environment's `turn_rewards` that are already counted.
        valid_actions: whether the action was valid, for each turn for which this is known.
        success: whether the task was solved, None if the environment does not report it.
        stop_reason: None while the episode runs, and without an engine.
        terminated: whether no state can follow, so that the value after the episode is 0.
        has_logprobs: whether every turn came with sampling log-probabilities.
        policy_versions: per turn the number of optimizer steps of the policy that sampled it; empty if
            the trained policy itself samples.
    """

    row: int
    columns: dict[str, Any]
    prompt: list[Message] | str
    name: str | None = None
    env_type: str | None = None
    instance: int = 0
    env: Any = None
    more: list[Context] = field(default_factory=list)
    current: Context | None = None
    opened: Counter[str] = field(default_factory=Counter)
    exchanges: list[tuple[list[Message], Message]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    pictures: list[str | None] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    has_turn_rewards: bool = False
    turn_rewards_seen: int = 0
    final_reward: float | None = None
    valid_actions: list[bool] = field(default_factory=list)
    success: bool | None = None
    stop_reason: StopReason | None = None
    error: str | None = None
    terminated: bool = False
    tool_calls: int = 0
    tool_failures: int = 0
    has_logprobs: bool = True
    policy_versions: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        tokens, reason = self.num_sampled, self.stop_reason and str(self.stop_reason)
        return f"Episode(row={self.row}, turns={self.num_turns}, {tokens=}, stop_reason={reason!r})"

    @property
    def contexts(self) -> list[Context]:
        """All contexts, in the order in which they were opened."""
        return [self, *self.more]

    @property
    def context(self) -> Context:
        """The context of the next turn."""
        return self if self.current is None else self.current

    @property
    def last(self) -> Context:
        """The context of the newest turn, or a context without turns that was opened later."""
        newest = self.contexts[-1]
        return max(self.contexts, key=lambda c: max(c.turns, default=-1)) if newest.turns else newest

    @property
    def trains(self) -> bool:
        """Return whether the episode is trained on: neither its environment nor its sampler has failed."""
        return self.stop_reason not in FAILURES

    @property
    def failed(self) -> bool:
        """Return whether the episode cannot be scored, because its environment is lost or it has no turn."""
        return not self.trains or not self.num_turns

    @property
    def conversational(self) -> bool:
        """Return whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str)

    @property
    def num_turns(self) -> int:
        """Number of turns sampled so far, in all contexts."""
        return sum(len(context.turn_spans) for context in self.contexts)

    @property
    def completion_ids(self) -> list[int]:
        """Tokens after the prompts of all contexts, in the order in which the contexts were opened."""
        return [token for context in self.contexts for token in context.ids]

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far, in all contexts."""
        return sum(sum(context.action_mask) for context in self.contexts)

    def turns_of_tokens(self) -> list[list[int]]:
        """Return the sampled tokens of each turn, in the order of the turns."""
        turns: dict[int, list[int]] = {}
        for context in self.contexts:
            for turn, (start, end) in zip(context.turns, context.turn_spans, strict=True):
                turns[turn] = context.ids[start:end]
        return [turns[turn] for turn in sorted(turns)]

    def append_turn(
        self, ids: list[int], logprobs: list[float] | None, context: Context | None = None
    ) -> None:
        """Append a sampled turn of at least one token to `context`, by default the first context.

        Nothing else writes a turn's span: all other tokens after a prompt are observations.
        """
        context = context or self
        self.has_logprobs = self.has_logprobs and logprobs is not None
        context.turns.append(self.num_turns)
        context.turn_spans.append((len(context.ids), len(context.ids) + len(ids)))
        context.append(ids, True, [0.0] * len(ids) if logprobs is None else logprobs)
        self.turn_rewards.append(0.0)
