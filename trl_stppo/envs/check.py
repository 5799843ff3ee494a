"""Check an environment against the contract. Violations raise errors, and usual mistakes give warnings."""

import asyncio
import contextlib
import itertools
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from ._check_values import Step, short
from .base import is_text_environment, without_prompt
from .by_hand import Action, HandPlayer, tools_of, turn_rewards

MAX_ROWS = 8
ODD_ACTIONS = ("", " \n", "\x00", "<answer>", '{"name": ', "9" * 400, "no such thing \u2603")
DEFAULT_ACTIONS = ("hello", "1", "<answer>1</answer>", "<action>up</action>", "\\boxed{1}")

Episode = tuple[str, list[Step]]
Rows = list[dict[str, Any]]


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
    check = _Check(env_or_factory, played, steps)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        found = check.run(actions)
    else:
        # In a notebook, a running loop cannot start another one.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(check.run, actions).result()
    columns = dict.fromkeys(column for row in played for column in row)
    found += filter(None, [without_prompt("rows", columns)])
    for message in found:
        warnings.warn(message, stacklevel=2)
    return found


class _Check:
    """One run of `check_env`, with the warnings that it found."""

    def __init__(self, env_or_factory: Any, rows: Rows, steps: int) -> None:
        # A class has the attribute `reset` too.
        self.several = isinstance(env_or_factory, type) or not hasattr(env_or_factory, "reset")
        self.source, self.rows, self.steps = env_or_factory, rows, steps
        self.player, self.found = HandPlayer(), list[str]()

    def run(self, actions: Sequence[Any] | None) -> list[str]:
        """Run all checks, close the instances, and return the warnings."""
        try:
            env = self.player.make(self.source) if self.several else self.source
            if is_text_environment(env):
                self.check_text(env, actions or DEFAULT_ACTIONS)
            else:
                self.check_tools(env, actions or ())
        except BaseException:
            # The first error is raised.
            with contextlib.suppress(Exception):
                self.player.close()
            raise
        self.player.close()
        return self.found

    def warn(self, message: str) -> None:
        """Record a warning. A repeated warning is recorded once."""
        if message not in self.found:
            self.found.append(message)

    def turns(self, env: Any, actions: Sequence[str]) -> list[Step]:
        """Play turns until the episode ends."""
        played = list[Step]()
        while len(played) < self.steps and not (played and played[-1].ended):
            played.append(self.player.play(env, actions[len(played) % len(actions)]))
        return played

    def episode(self, env: Any, row: dict[str, Any], actions: Sequence[str]) -> Episode:
        """Reset a text environment and play turns until the episode ends."""
        return self.player.reset(env, row), self.turns(env, actions)

    def check_text(self, env: Any, actions: Sequence[str]) -> None:
        """Check a text environment."""
        name, row, reset = type(env).__name__, self.rows[0], self.player.reset
        episodes = [self.episode(env, each, actions) for each in self.rows]
        for played in (played for _, played in episodes if played):
            if any("valid_action" not in step.info for step in played):
                self.warn(f"{name}.step returns no info['valid_action'] (bool) for the metrics.")
            if played[-1].ended and played[-1].info.get("success") is None:
                self.warn(f"{name}.step ends an episode without info['success'] (bool).")
        reset(env, row)
        # This episode is abandoned.
        self.player.play(env, actions[0])
        first, again = episodes[0], self.episode(env, row, actions)
        ended = True
        for action in ODD_ACTIONS:
            if ended:
                reset(env, row)
            ended = self.player.play(env, action).ended
        if again[0] != first[0]:
            self.warn(f"{name}.reset returns another text for the same row.")
        elif _results(again) != _results(first):
            self.warn(f"{name}.step returns other results for the same actions in another episode.")
        elif self.several:
            one, other = self.player.make(self.source), self.player.make(self.source)
            opening = reset(one, row)
            # Actions that differ from the first instance's reveal a shared state.
            self.episode(other, self.rows[-1], [*actions[1:], actions[0]])
            together = opening, self.turns(one, actions)
            if _results(together) != _results(first) or reset(one, row) != first[0]:
                raise _sharing(one)

    def check_tools(self, env: Any, calls: Sequence[Action]) -> None:
        """Check a tool environment, whose public methods are tools."""
        from transformers.utils import get_json_schema

        name, reset = type(env).__name__, self.player.reset
        if not tools_of(env):
            raise EnvironmentContractError(f"{name} has neither `step` nor a tool.")
        for tool in tools_of(env):
            try:
                get_json_schema(getattr(env, tool))
            except Exception as error:
                what = f"{name}.{tool} cannot be described to the model ({error})."
                raise EnvironmentContractError(what) from error
        openings = [self.tool_episode(env, row, calls) for row in self.rows]
        if (rewards := turn_rewards(env)) is not None:
            # As a tool would.
            rewards.append(0.0)
        again = reset(env, self.rows[0])
        if turn_rewards(env):
            raise EnvironmentContractError(f"{name}.reset does not empty turn_rewards.")
        if again != openings[0]:
            self.warn(f"{name}.reset returns another text for the same row.")
        if self.several:
            other = self.player.make(self.source)
            self.tool_episode(other, self.rows[-1], calls)
            rewards = turn_rewards(env)
            if rewards is not None and (rewards or rewards is turn_rewards(other)):
                raise EnvironmentContractError(f"Two {name} share one list turn_rewards.")
            if again == openings[0] != reset(env, self.rows[0]):
                raise _sharing(env)

    def tool_episode(self, env: Any, row: dict[str, Any], calls: Sequence[Action]) -> str:
        """Reset, call the tools, and check the rewards. Return the text of `reset`."""
        opening = self.player.reset(env, row)
        for call in calls:
            try:
                result = self.player.play(env, call).observation
            except KeyError as error:
                raise ValueError(f"`actions`: {error.args[0]}") from error
            except EnvironmentContractError as error:
                # The model reads what a tool raises; rewards that are no numbers end a run.
                if error.__cause__ is None:
                    raise
                self.warn(str(error))
                continue
            if not isinstance(result, str | list):
                tool = f"{type(env).__name__}.{call[0]}"
                self.warn(f"{tool} returned {short(result)}; the model reads it as JSON.")
        self.player.final_reward(env)
        return opening


def _results(episode: Episode) -> list[Any]:
    """Return the parts of an episode that must be equal when its actions are played again."""
    opening, played = episode
    return [opening, *((s.observation, s.reward, s.terminated) for s in played)]


def _sharing(env: Any) -> EnvironmentContractError:
    return EnvironmentContractError(
        f"Two instances of {type(env).__name__} share state: one changes while another is played."
    )
