"""Check an environment against the contract. Violations raise errors, and usual mistakes give warnings."""

import asyncio
import contextlib
import inspect
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from ._check_values import Step, check_number, check_opening, check_step, short
from .base import is_text_environment, tool_names, without_prompt

MAX_ROWS = 8
SLOW_SECONDS = 1.0
LONG_OBSERVATION = 20_000
ODD_ACTIONS = ("", " \n", "\x00", "<answer>", '{"name": ', "9" * 400, "no such thing \u2603")
DEFAULT_ACTIONS = ("hello", "1", "<answer>1</answer>", "<action>up</action>", "\\boxed{1}")

Episode = tuple[str, list[Step]]
Rows = list[dict[str, Any]]
Calls = Sequence[tuple[str, dict[str, Any]]]


def check_env(
    env_or_factory: Any,
    rows: Iterable[dict[str, Any]] | None = None,
    *,
    actions: Sequence[Any] | None = None,
    steps: int = 20,
    seed: int = 0,
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
            for a tool environment. Actions that reach more of a game check more. None plays a few
            texts, and calls no tool.
        steps: turns of an episode at most.
        seed: column `seed` of the made-up row.

    Returns:
        The warnings, which are also issued as `UserWarning`.

    Raises:
        EnvironmentContractError: the environment breaks the contract.
        ValueError: there is no row, or an action names an unknown tool.
    """
    made_up = [{"prompt": [{"role": "user", "content": ""}], "seed": seed}]
    played = list(itertools.islice(rows, MAX_ROWS)) if rows is not None else made_up
    if not played:
        raise ValueError("`rows` is empty: must be None, or have a row.")
    check = _Check(env_or_factory)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        found = check.run(played, actions, steps)
    else:  # in a notebook: a running loop cannot start another one
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(check.run, played, actions, steps).result()
    columns = dict.fromkeys(column for row in played for column in row)
    found += filter(None, [without_prompt("rows", columns)])
    for message in found:
        warnings.warn(message, stacklevel=2)
    return found


def check_schema(name: str, tool: Callable[..., Any]) -> None:
    """Raise an error if transformers cannot make a tool schema of the method."""
    from transformers.utils import get_json_schema

    try:
        get_json_schema(tool)
    except Exception as error:
        raise EnvironmentContractError(
            f"{name} cannot be described to the model ({type(error).__name__}: {error})."
        ) from error


class _Check:
    """One run of `check_env`, with the instances that it made and the warnings that it found."""

    def __init__(self, env_or_factory: Any) -> None:
        # A class has the attribute `reset` too.
        self.several = isinstance(env_or_factory, type) or not hasattr(env_or_factory, "reset")
        self.source = env_or_factory
        self.made: list[Any] = []
        self.found: list[str] = []
        # Two permanent threads: a new thread may get the number of an ended one.
        self.threads = itertools.cycle([ThreadPoolExecutor(1), ThreadPoolExecutor(1)])
        self.seconds: dict[str, list[float]] = {}

    def run(self, rows: Rows, actions: Sequence[Any] | None, steps: int) -> list[str]:
        """Run all checks, close the instances, and return the warnings, also those of slow calls."""
        with asyncio.Runner() as self.runner:
            try:
                env = self.make()
                signature, name = inspect.signature(env.reset), type(env).__name__
                if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
                    self.warn(f"{name}.reset{signature} has no **row for the other columns.")
                if is_text_environment(env):
                    self.check_text(env, rows, actions or DEFAULT_ACTIONS, steps)
                else:
                    self.check_tools(env, rows, actions or ())
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is raised
                    self.close()
                raise
            self.close()
        for name, (first, *later) in self.seconds.items():
            # The first call may load data that the process shares.
            if (seconds := max(later, default=first)) > SLOW_SECONDS:
                self.warn(f"{name} took {seconds:.1f} s at its slowest; each turn waits for it.")
        return self.found

    def warn(self, message: str) -> None:
        """Record a warning. A repeated warning is recorded once."""
        if message not in self.found:
            self.found.append(message)

    def make(self) -> Any:
        """Return a new instance of the factory, or the caller's instance if no factory was given."""
        if not self.several:
            return self.source
        try:
            env = self.source()
        except Exception as error:
            what = f"The factory raised {_described(error)}"
            raise EnvironmentContractError(what) from error
        name = type(env).__name__
        if not callable(getattr(env, "reset", None)):
            raise EnvironmentContractError(f"{name} has no method `reset`.")
        if any(env is other for other in self.made):
            raise EnvironmentContractError(f"The factory returned the same {name} twice.")
        self.made.append(env)
        return env

    def close(self) -> None:
        """Close all instances that this run made."""
        for env in self.made:
            is_tool = not is_text_environment(env) and "close" in tool_names(env)
            if hasattr(env, "close") and not is_tool:
                self.call(env, "close")

    def play(self, env: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the environment, alternating between two threads. An `async` method is awaited."""
        name, function = f"{type(env).__name__}.{method}", getattr(env, method)
        started = time.perf_counter()
        try:
            result = next(self.threads).submit(function, *args, **kwargs).result()
        except ValueError as error:
            if method in ("reset", "step", "get_reward") or "in main thread" not in str(error):
                raise
            result = function(*args, **kwargs)  # as a training does with tools
        if inspect.iscoroutinefunction(function):
            result = self.runner.run(result)
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise EnvironmentContractError(f"{name} returned an awaitable; use `async def`.")
        return result

    def call(self, env: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method through `play`. If the method raises, raise an EnvironmentContractError."""
        try:
            return self.play(env, method, *args, **kwargs)
        except EnvironmentContractError:
            raise
        except Exception as error:
            values = [*map(short, args), *(f"{k}={short(v)}" for k, v in kwargs.items())]
            call = f"{type(env).__name__}.{method}({', '.join(values)})"
            raise EnvironmentContractError(f"{call} raised {_described(error)}") from error

    def reset(self, env: Any, row: dict[str, Any]) -> str:
        """Call `reset` with a row, and return the checked text."""
        name, tools = f"{type(env).__name__}.reset", not is_text_environment(env)
        return check_opening(name, self.call(env, "reset", **row), tools=tools)

    def step(self, env: Any, action: Any) -> Step:
        """Call `step` of a text environment, and return the checked result."""
        return check_step(f"{type(env).__name__}.step", self.call(env, "step", action))

    def turns(self, env: Any, actions: Sequence[str], most: int) -> list[Step]:
        """Play up to `most` turns, until the episode ends."""
        played = list[Step]()
        while len(played) < most and not (played and played[-1].ended):
            played.append(self.step(env, actions[len(played) % len(actions)]))
        return played

    def episode(self, env: Any, row: dict[str, Any], actions: Sequence[str], most: int) -> Episode:
        """Reset a text environment and play at most `most` turns."""
        return self.reset(env, row), self.turns(env, actions, most)

    def check_text(self, env: Any, rows: Rows, actions: Sequence[str], steps: int) -> None:
        """Check a text environment."""
        name, row = type(env).__name__, rows[0]
        episodes = [self.episode(env, row, actions, steps) for row in rows]
        for opening, played in episodes:
            self.check_episode(name, opening, played)
        first = episodes[0]
        self.check_joint(name, rows, [opening for opening, _ in episodes])
        self.reset(env, row)
        if callable(getattr(env, "render", None)):
            picture = self.call(env, "render")
            if not isinstance(picture, str):
                self.warn(
                    f"{name}.render returned {short(picture)}; the trace page shows text or SVG."
                )
        self.step(env, actions[0])  # an abandoned episode
        again = self.episode(env, row, actions, len(first[1]))
        if again[1] and again[1][-1].ended:
            with contextlib.suppress(Exception):  # raising is correct
                if not self.step(env, actions[0]).ended:
                    self.warn(f"{name}.step goes on after the end of the episode; raise there.")
        ended = True
        for action in ODD_ACTIONS:
            if ended:
                self.reset(env, row)
            ended = self.step(env, action).ended
        if again[0] != first[0]:
            self.warn(f"{name}.reset returns another text for the same row.")
        elif _results(again) != _results(first):
            self.warn(f"{name}.step returns other results for the same actions in another episode.")
        elif self.several:
            self.check_sharing(rows, actions, first)

    def check_episode(self, name: str, opening: str, played: list[Step]) -> None:
        """Warn of usual mistakes in a played episode."""
        longest = max(map(len, [opening, *(step.observation for step in played)]))
        if longest > LONG_OBSERVATION:
            self.warn(f"{name} returns up to {longest:,} characters at once; a context is small.")
        if any("valid_action" not in step.info for step in played):
            self.warn(f"{name}.step returns no info['valid_action'] (bool) for the metrics.")
        if played and played[-1].ended and played[-1].info.get("success") is None:
            self.warn(f"{name}.step ends an episode without info['success'] (bool).")
        if played and played[-1].terminated and played[-1].truncated:
            self.warn(f"{name}.step returned both terminated and truncated; terminated counts.")
        rewards = [step.reward for step in played]
        if len(set(rewards)) >= 3 and rewards in (sorted(rewards), sorted(rewards, reverse=True)):
            self.warn(
                f"{name}.step returned rewards that only rise or only fall, as a running sum: "
                f"{[round(r, 4) for r in rewards[:6]]}; a reward must be that of its turn alone."
            )

    def check_joint(self, name: str, rows: Rows, openings: list[str]) -> None:
        """Warn once if the text of `reset` continues the last word of the prompt."""
        for row, opening in zip(rows, openings, strict=True):
            prompt = row.get("prompt")
            last = prompt[-1] if prompt and isinstance(prompt, list) else prompt
            before = last.get("content") if isinstance(last, dict) else last
            if isinstance(before, str) and before[-1:].isalnum() and opening[:1].isalnum():
                self.warn(
                    f"{name}.reset's text runs into the prompt: {before[-20:] + opening[:20]!r}; "
                    "begin it with a space or a line break."
                )
                break

    def check_sharing(self, rows: Rows, actions: Sequence[str], alone: Episode) -> None:
        """Check that an instance returns the same results while a second instance is played."""
        one, other = self.make(), self.make()
        opening = self.reset(one, rows[0])
        # Actions that differ from the first instance's reveal a shared state.
        self.episode(other, rows[-1], [*actions[1:], actions[0]], len(alone[1]))
        together = opening, self.turns(one, actions, len(alone[1]))
        if _results(together) != _results(alone) or self.reset(one, rows[0]) != alone[0]:
            raise _sharing(one)

    def check_tools(self, env: Any, rows: Rows, calls: Calls) -> None:
        """Check a tool environment, whose public methods are tools."""
        name, names = type(env).__name__, tool_names(env)
        if not names:
            raise EnvironmentContractError(f"{name} has neither `step` nor a tool.")
        for tool in names:
            check_schema(f"{name}.{tool}", getattr(env, tool))
        openings = [self.tool_episode(env, row, calls) for row in rows]
        self.check_joint(name, rows, openings)
        if (rewards := _turn_rewards(env)) is not None:
            rewards.append(0.0)  # as a tool would
        again = self.reset(env, rows[0])
        if _turn_rewards(env):
            raise EnvironmentContractError(f"{name}.reset does not empty turn_rewards.")
        if again != openings[0]:
            self.warn(f"{name}.reset returns another text for the same row.")
        if self.several:
            other = self.make()
            self.tool_episode(other, rows[-1], calls)
            rewards = _turn_rewards(env)
            if rewards is not None and (rewards or rewards is _turn_rewards(other)):
                raise EnvironmentContractError(f"Two {name} share one list turn_rewards.")
            if again == openings[0] != self.reset(env, rows[0]):
                raise _sharing(env)

    def tool_episode(self, env: Any, row: dict[str, Any], calls: Calls) -> str:
        """Reset the environment, call the tools, and check the rewards. Return the text of `reset`."""
        name, opening = type(env).__name__, self.reset(env, row)
        for tool, arguments in calls:
            if tool not in tool_names(env):
                raise ValueError(f"`actions` has {tool!r}; allowed: {', '.join(tool_names(env))}.")
            try:
                result = self.play(env, tool, **arguments)
            except EnvironmentContractError:
                raise
            except Exception as error:
                self.warn(f"{name}.{tool} raised {_described(error)}")
                continue
            if not isinstance(result, str | list):
                self.warn(f"{name}.{tool} returned {short(result)}; the model reads it as JSON.")
        if callable(getattr(env, "get_reward", None)):
            reward = self.call(env, "get_reward")
            if reward is not None:
                check_number(f"{name}.get_reward returned", reward)
        for reward in _turn_rewards(env) or ():
            check_number(f"{name}.turn_rewards holds", reward)
        return opening


def _described(error: Exception) -> str:
    """Return the type, the message and the place of an environment's exception."""
    place, cure = traceback.extract_tb(error.__traceback__)[-1], ""
    if "same thread" in str(error) or "main thread" in str(error):
        cure = "; a training calls from several threads. Set check_same_thread=False of sqlite3.connect, "
        cure += "or give environment_factory=isolated(...)."
    # A call that does not fit the signature fails in the thread's file.
    where = "" if "concurrent" in place.filename else f" ({place.filename}:{place.lineno})"
    return f"{type(error).__name__}: {error}{where}{cure}"


def _results(episode: Episode) -> list[Any]:
    """Return the parts of an episode that must be equal when its actions are played again."""
    opening, played = episode
    return [opening, *((s.observation, s.reward, s.terminated) for s in played)]


def _turn_rewards(env: Any) -> list[Any] | None:
    rewards = getattr(env, "turn_rewards", None)
    if not isinstance(rewards, list | None):
        raise EnvironmentContractError(
            f"{type(env).__name__}.turn_rewards is {short(rewards)}; allowed: a list of floats."
        )
    return rewards


def _sharing(env: Any) -> EnvironmentContractError:
    return EnvironmentContractError(
        f"Two instances of {type(env).__name__} share state: one changes while another is played."
    )
