"""Plays environments with actions in place of a model, and checks them against the contract.

Violations raise errors, and usual mistakes give warnings.
"""

import asyncio
import functools
import inspect
import itertools
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from .base import (
    Row,
    Step,
    check_number,
    check_opening,
    check_step,
    described,
    is_text_environment,
    result_text,
    taken_columns,
    tool_names,
    tool_schema,
    without_prompt,
)

MAX_ROWS = 8
ODD_ACTIONS = ("", " \n", "\x00", "<answer>", '{"name": ', "9" * 400, "no such thing \u2603")
DEFAULT_ACTIONS = ("hello", "1", "<answer>1</answer>", "<action>up</action>", "\\boxed{1}")

# A turn is a text, or a tool with its arguments.
Action = str | tuple[str, dict[str, Any]]
Episode = tuple[str, list[Step]]


class HandPlayer:
    """Plays environments as a training does: calls alternate between two threads; one loop runs coroutines.

    Methods raise EnvironmentContractError if the environment raises or returns what is not allowed.
    """

    def __init__(self) -> None:
        self._runner, self._made = asyncio.Runner(), list[object]()
        # The loop has a thread of its own, because a notebook's main thread already runs a loop.
        self._awaiting = ThreadPoolExecutor(1)
        # Keep both threads alive: sqlite3 compares thread ids, and an ended thread's id is given again.
        # Each thread has an event loop, as in a training.
        begin = functools.partial(asyncio.set_event_loop, self._runner.get_loop())
        self._threads = itertools.cycle([ThreadPoolExecutor(1, "", begin) for _ in range(2)])

    def make(self, factory: Callable[[], Any]) -> Any:
        """Return a new instance, which `close` closes."""
        try:
            env = factory()
        except Exception as error:
            what = f"The factory raised {described(error)}"
            raise EnvironmentContractError(what) from error
        name = type(env).__name__
        if not callable(getattr(env, "reset", None)):
            raise EnvironmentContractError(f"{name} has no method `reset`.")
        if any(env is other for other in self._made):
            raise EnvironmentContractError(f"The factory returned the same {name} twice.")
        self._made.append(env)
        return env

    def close(self) -> None:
        """Close the instances that were made."""
        for env in self._made:
            if hasattr(env, "close") and "close" not in tools_of(env):
                self.call(env, "close")
        self._awaiting.submit(self._runner.close).result()

    def reset(self, env: Any, row: Row) -> str:
        """Start an episode; return the text."""
        is_text, name = is_text_environment(env), f"{type(env).__name__}.reset"
        columns = taken_columns(env.reset, row, 0) if is_text else row
        opening = check_opening(name, self.call(env, "reset", **columns))
        if not is_text and turn_rewards(env):
            raise EnvironmentContractError(f"{name} does not empty turn_rewards.")
        return opening

    def play(self, env: object, action: Action) -> Step:
        """Play a turn. The reward of a tool call is the sum that the call adds to `turn_rewards`.

        A tool that does not exist raises ValueError.
        """
        if isinstance(action, str):
            return check_step(f"{type(env).__name__}.step", self.call(env, "step", action))
        name, arguments = action
        if name not in tools_of(env):
            raise ValueError(f"{name!r} is no tool; allowed: {', '.join(tools_of(env)) or 'none'}.")
        before = sum(turn_rewards(env) or ())
        result = self.call(env, name, **arguments)
        text = result_text(f"{type(env).__name__}.{name}", result)
        return Step(text, sum(turn_rewards(env) or ()) - before, False, False, {})

    def final_reward(self, env: Any) -> float:
        """Return the reward of the whole episode, or 0.0 if there is none."""
        if is_text_environment(env) or not callable(getattr(env, "get_reward", None)):
            return 0.0
        reward = self.call(env, "get_reward")
        name = f"{type(env).__name__}.get_reward returned"
        return 0.0 if reward is None else check_number(name, reward)

    def call(self, env: object, method: str, /, *args: object, **kwargs: object) -> Any:
        """Call a method, and await its result if it can be awaited."""
        name, function = f"{type(env).__name__}.{method}", getattr(env, method)
        try:
            try:
                result = next(self._threads).submit(function, *args, **kwargs).result()
            except ValueError as error:
                if method not in tools_of(env) or "in main thread" not in str(error):
                    raise
                # Only the main thread can set a signal handler.
                result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = self._awaiting.submit(self._runner.run, _awaited(result)).result()
        except Exception as error:
            given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            what = f"{name}({given:.400}) raised {described(error)}"
            raise EnvironmentContractError(what) from error
        return result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def tools_of(env: object) -> list[str]:
    """Return the names of an environment's tools, none for a text environment."""
    return [] if is_text_environment(env) else tool_names(env)


def turn_rewards(env: object) -> list[Any] | None:
    """Return the checked list of rewards that tools add, or None if there is none."""
    rewards, name = getattr(env, "turn_rewards", None), f"{type(env).__name__}.turn_rewards"
    if not isinstance(rewards, list | None):
        raise EnvironmentContractError(f"{name} is {rewards!r:.200}; allowed: a list of floats.")
    for reward in rewards or ():
        check_number(f"{name} holds", reward)
    return rewards


def check_env(
    env_or_factory: Any,
    rows: Iterable[Row] | None = None,
    *,
    actions: Sequence[Action] | None = None,
    steps: int = 20,
) -> list[str]:
    """Play an environment and look for violations of the contract and usual mistakes.

    It works for text environments (`reset`, `step`) and for TRL's tool environments, synchronous or
    not. Calls alternate between two threads, as in a training.

    Args:
        env_or_factory: a factory as in `environment_factory` (a class, a function, a partial), or an
            instance. The check for shared state needs a factory.
        rows: rows of the data set, of which the first 8 are played; None for one row with `prompt`
            and `seed`.
        actions: turns to play, repeated from the start: texts for a text environment, `(tool, arguments)`
            for a tool environment, once each. Actions that reach more of a game check more. None plays a
            few texts, and calls no tool.
        steps: largest number of turns of an episode.

    Returns:
        The warnings, which are also issued as `UserWarning`.

    Raises:
        EnvironmentContractError: the environment breaks the contract.
        ValueError: there is no row, or an action names an unknown tool.
    """
    made_up = [{"prompt": [{"role": "user", "content": ""}], "seed": 0}]
    played = list(itertools.islice(rows, MAX_ROWS)) if rows is not None else made_up
    if not played:
        raise ValueError("`rows` is empty: must be None, or have a row.")
    check = _Check(env_or_factory, played, steps)
    found = check.run(actions)
    columns = dict.fromkeys(column for row in played for column in row)
    found += filter(None, [without_prompt("rows", columns)])
    for message in found:
        warnings.warn(message, stacklevel=2)
    return found


class _Check:
    """One run of `check_env`, with the warnings that it found."""

    def __init__(self, env_or_factory: Any, rows: list[Row], steps: int) -> None:
        # A class is a factory, although it has the attribute `reset`.
        self.several = isinstance(env_or_factory, type) or not hasattr(env_or_factory, "reset")
        self.source, self.rows, self.steps = env_or_factory, rows, steps
        self.player, self.found = HandPlayer(), list[str]()

    def run(self, actions: Sequence[Action] | None) -> list[str]:
        """Run all checks, close the instances, and return the warnings."""
        try:
            env = self.player.make(self.source) if self.several else self.source
            self.check(env, actions or (DEFAULT_ACTIONS if is_text_environment(env) else ()))
        finally:
            self.player.close()
        return list(dict.fromkeys(self.found))

    def check(self, env: object, actions: Sequence[Action]) -> None:
        """Play the rows, the first row again, and two instances in alternation."""
        name, row, is_text = type(env).__name__, self.rows[0], is_text_environment(env)
        if not is_text:
            if not tools_of(env):
                raise EnvironmentContractError(f"{name} has neither `step` nor a tool.")
            for tool in tools_of(env):
                tool_schema(getattr(env, tool), f"{name}.{tool}")
        episodes = [self.episode(env, each, actions) for each in self.rows]
        if is_text:
            for played in (played for _, played in episodes if played):
                if any("valid_action" not in step.info for step in played):
                    self.found.append(f"{name}.step returns no info['valid_action'] (bool) for the metrics.")
                if played[-1].ended and played[-1].info.get("success") is None:
                    self.found.append(f"{name}.step ends an episode without info['success'] (bool).")
            ended = True
            for odd in ODD_ACTIONS:
                if ended:
                    self.player.reset(env, row)
                ended = self.player.play(env, odd).ended
        elif (rewards := turn_rewards(env)) is not None:
            # Add a reward as a tool would, so that `reset` must empty the list.
            rewards.append(0.0)
        first, again = episodes[0], self.episode(env, row, actions)
        if again[0] != first[0]:
            self.found.append(f"{name}.reset returns another text for the same row.")
        elif _results(again) != _results(first):
            method = f"{name}.step" if is_text else f"A tool of {name}"
            self.found.append(f"{method} returns other results for the same actions in another episode.")
        elif self.several:
            one, other = self.player.make(self.source), self.player.make(self.source)
            opening = self.player.reset(one, row)
            # Play other actions than with the first instance, so that a shared state shows.
            self.episode(other, self.rows[-1], [*actions[1:], *actions[:1]])
            if not is_text and turn_rewards(one) is turn_rewards(other) is not None:
                raise EnvironmentContractError(f"Two {name} share one list turn_rewards.")
            together = opening, self.turns(one, actions)
            if _results(together) != _results(first) or self.player.reset(one, row) != first[0]:
                raise EnvironmentContractError(
                    f"Two instances of {name} share state: one changes while another is played."
                )

    def episode(self, env: object, row: Row, actions: Sequence[Action]) -> Episode:
        """Reset an environment and play turns until the episode ends."""
        played = self.player.reset(env, row), self.turns(env, actions)
        self.player.final_reward(env)
        return played

    def turns(self, env: object, actions: Sequence[Action]) -> list[Step]:
        """Play turns until the episode ends, or each tool call once."""
        played, is_text = list[Step](), is_text_environment(env)
        most = self.steps if is_text else len(actions)
        while len(played) < most and not (played and played[-1].ended):
            action = actions[len(played) % len(actions)]
            try:
                step = self.player.play(env, action)
            except EnvironmentContractError as error:
                # Only warn, because a tool's error is its answer. A reward that is no number would end a run.
                if is_text or error.__cause__ is None:
                    raise
                self.found.append(str(error))
                step = Step("", 0.0, False, False, {})
            played.append(step)
        return played


def _results(episode: Episode) -> list[object]:
    """Return the parts of an episode that must be equal when its actions are played again."""
    opening, played = episode
    return [opening, *((s.observation, s.reward, s.terminated) for s in played)]
