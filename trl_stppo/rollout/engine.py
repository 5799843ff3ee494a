"""Plays the episodes of a rollout, each at its own pace.

The caller's thread generates and keeps all state; environments run on workers. The cycle of an
episode: its environment answers -> the answer is appended to its row -> the backend samples its
next turn, together with all other ready episodes -> the turn goes to its environment. No episode is
delayed by a slower one, and a failure of an environment ends its episode alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import EnvironmentFailureError, ThreadStartError
from ..generation.protocol import Backend
from ..threads import DaemonThread
from .agent_driver import AgentDriver
from .chat import ChatRenderer, Message
from .episode import Durations, Episode
from .loop import EpisodeLoop, Parts
from .record import FAILURES, culprit

logger = logging.getLogger(__name__)

# Failed episodes in a row after which the environment counts as broken, not flaky.
MAX_FAILURES_IN_A_ROW = 64
# Time for all environments together to close, in seconds.
CLOSE_SECONDS = 2.0


class RolloutEngine(Parts):
    """Plays episodes of any number of named environments. The constructor's arguments are `Parts`."""

    failures_in_a_row = 0

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: Sequence[list[Message] | str],
        renderer: ChatRenderer,
        backend: Backend,
        seed: tuple[int, ...] = (0,),
        first_row: int = 0,
        names: Sequence[tuple[int, ...]] | None = None,
        prompt_ids: Sequence[list[int]] | None = None,
        label: Callable[[int], str] | None = None,
    ) -> tuple[list[Episode], Durations]:
        """Play one episode per data set row.

        `rows` are columns for `reset`. `seed` and `first_row` (or `names`) are the seeds of the
        episodes. `prompt_ids` replace the rendered prompts. `label` names the rows, by default by `names`.
        """
        episodes, indices = self._episodes(rows, prompts)
        if prompt_ids is not None:
            for episode in episodes:
                episode.prompt_ids = list(prompt_ids[episode.row])
        if names is None:
            names = [(first_row + row,) for row in range(len(rows))]
        seeds, numbers = [(*seed, *name) for name in names], [name[0] for name in names]
        label = label or (lambda row: f"row {numbers[row]}")
        loop = EpisodeLoop(self, episodes, indices, renderer, backend, seeds, label)
        loop.play()
        self._report(episodes)
        return episodes, Durations(loop.env_seconds, loop.wait_seconds, loop.generation_seconds)

    def close(self) -> None:
        """Close the environments within a short time, and release the workers."""
        if self.pool is not None:
            pool, run_async = self.pool, self.calls.run_async
            closing = DaemonThread(pool.close, "closing", run_async)
            try:
                closing.start()
                closing.join(CLOSE_SECONDS)
            except ThreadStartError:
                # The interpreter is ending and starts no more threads.
                logger.debug("environments are not closed: the interpreter is ending")
        for driver in self.drivers.values():
            driver.close()
        self.calls.close()

    def _episodes(
        self, rows: Sequence[dict[str, Any]], prompts: Sequence[list[Message] | str]
    ) -> tuple[list[Episode], list[int]]:
        episodes, indices, used = [], [], Counter[str | None]()
        named = None not in self.drivers
        for position, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            name = row.get("environment") if named else None
            if name not in self.drivers:
                raise ValueError(f"`environment={name!r}`: allowed are {list(self.drivers)}.")
            driver = self.drivers[name]
            if driver.tools and isinstance(prompt, str):
                raise ValueError("`prompt` is a string; tools need messages.")
            columns = {k: v for k, v in row.items() if not (named and k == "environment")}
            episodes.append(Episode(position, columns, prompt, name, driver.type_name))
            indices.append(used[name])
            used[name] += 1
        return episodes, indices

    def _report(self, episodes: list[Episode]) -> None:
        """Warn of failed episodes, and raise an error after too many failures in a row."""
        for episode in episodes:
            failed = episode.stop_reason in FAILURES
            self.failures_in_a_row = self.failures_in_a_row + 1 if failed else 0
        errors = [str(e.error) for e in episodes if e.stop_reason in FAILURES]
        agents = any(isinstance(driver, AgentDriver) for driver in self.drivers.values())
        plain = not any(driver.type_name for driver in self.drivers.values())
        source = "agent" if agents else "prompt" if plain else "environment"
        who = culprit((e.stop_reason for e in episodes), source)
        if errors:
            common = "; ".join(f"{text} ({n}x)" for text, n in Counter(errors).most_common(3))
            text = "%d of %d episodes ended in a failure of their %s: %s"
            logger.warning(text, len(errors), len(episodes), who, common)
        if self.failures_in_a_row >= max(MAX_FAILURES_IN_A_ROW, len(episodes)):
            count, self.failures_in_a_row = self.failures_in_a_row, 0
            raise EnvironmentFailureError(
                f"The last {count} episodes all ended in a failure of their {who}. The newest: "
                f"{errors[-1].rstrip('.')}. Try `trl-stppo env check`."
            )
