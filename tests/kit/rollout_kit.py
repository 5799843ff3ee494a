"""Plays episodes on the engine: a backend that says what a script says, and a tool format to read.

Texts are those of `tests.kit.episodes`: one token per character, `[` and `]` for the chat markers. A turn
calls tools if it starts with "!": "!look desk;ask who]" is `look(x="desk")` and `ask(x="who")`. After
such a turn the template says "[t desk][t who][a ".
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.kit.episodes import EOS, TOKENIZER, ids, text
from tests.kit.waiting import PATIENCE
from trl_stppo.generation.protocol import TurnRequest, TurnResult
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.rollout.driver import TextDriver
from trl_stppo.rollout.engine import RolloutEngine
from trl_stppo.rollout.environments import EnvironmentPool, split_environments
from trl_stppo.rollout.episode import Durations, Episode, Limits
from trl_stppo.rollout.tool_driver import Parse, ToolDriver
from trl_stppo.rollout.workers import EnvironmentCalls

RENDERER = ChatRenderer(TOKENIZER, [EOS])
PROMPT = [{"role": "user", "content": "q"}]
Script = Callable[[int, int], str]
BUILT: list[RolloutEngine] = []
EARLIER: list[threading.Thread] = []


class ScriptedBackend:
    """Says `script(row, turn)`, cut to the limit, and holds the engine to the protocol.

    Row and turn are those of the request's seed. `logprobs` tells whether a turn comes with -1, -2, ...,
    `steps` how many steps it takes, `pause` how many seconds a step takes.
    """

    def __init__(
        self,
        script: Script,
        *,
        capacity: int | None = None,
        logprobs: Callable[[int, int], bool] = lambda row, turn: False,
        steps: Callable[[int, int], int] = lambda row, turn: 1,
        whole_batches: bool = False,
        pause: float = 0.0,
    ) -> None:
        self.capacity, self.whole_batches = capacity, whole_batches
        self.script, self.logprobs, self.steps, self.pause = script, logprobs, steps, pause
        self.requests: list[TurnRequest] = []
        self.batches: list[list[int]] = []
        self.held: dict[int, list[int]] = {}
        self.most = 0
        self._queue: dict[int, tuple[TurnRequest, int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def add(self, request: TurnRequest) -> None:
        key = request.key
        assert key not in self._queue, "a second turn of the same episode"
        assert request.max_new_tokens >= 1
        before = self.held.get(key, [])
        assert request.ids[: len(before)] == before, "the row does not extend the one before"
        self.held[key] = list(request.ids)
        self.most = max(self.most, len(self.held))
        assert self.capacity is None or len(self.held) <= self.capacity
        self.requests.append(request)
        self._queue[key] = request, self.steps(*request.seed[-2:])

    def step(self) -> list[TurnResult]:
        assert self.busy
        time.sleep(self.pause)
        results = []
        for key, (request, left) in list(self._queue.items()):
            self._queue[key] = request, left - 1
            if left <= 1:
                del self._queue[key]
                results.append(self._result(request))
        self.batches.append([result.key for result in results])
        return results

    def release(self, key: int) -> None:
        self._queue.pop(key, None)
        self.held.pop(key, None)

    def _result(self, request: TurnRequest) -> TurnResult:
        row, turn = request.seed[-2:]
        said = ids(self.script(row, turn))[: request.max_new_tokens]
        known = self.logprobs(row, turn)
        return TurnResult(request.key, said, [-1.0 - i for i in range(len(said))] if known else None)


def says(*rows: Sequence[str]) -> Script:
    """A script that is written down: for each row its turns."""
    return lambda row, turn: rows[row][turn]


def parse(turn: list[int], before: list[int], tools: list[Any]) -> dict[str, Any]:
    """Calls of a turn that starts with "!", each "name" or "name argument"."""
    said = text(turn).removesuffix("]")
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if said.startswith("!"):
        message["tool_calls"] = [requested(*one.split(" ", 1)) for one in said[1:].split(";")]
    return message


def requested(name: str, *argument: str, **arguments: Any) -> dict[str, Any]:
    """One call, as the parser of a real template gives it."""
    arguments = {"x": argument[0]} if argument else arguments
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def build(
    factory: Any = None, *, standalone: Sequence[Any] = (), parse: Parse = parse, **limits: Any
) -> RolloutEngine:
    """An engine for factories of either kind, put together as the trainer does it."""
    texts, tools, probes = split_environments(factory)
    calls = EnvironmentCalls()
    pool = EnvironmentPool({**texts, **tools}, probes)
    decode, wait = RENDERER.decode_action, calls.run_async
    drivers: dict[str | None, Any] = {
        name: TextDriver(pool, name, probes[name], decode, wait) for name in texts
    }
    with_tools = [(pool, name, probes[name]) for name in tools]
    for place in with_tools or ([] if drivers else [(None, None, None)]):
        drivers[place[1]] = ToolDriver(
            *place, list(standalone), parse, wait, calls.run_on_poller
        )  # fmt: skip
    limits = Limits(**{"max_completion_tokens": 200, **limits})
    BUILT.append(RolloutEngine(drivers, pool, calls, limits))
    return BUILT[-1]


@dataclass
class Played:
    """What came of a rollout; `only` is its only episode."""

    episodes: list[Episode]
    durations: Durations
    backend: ScriptedBackend

    @property
    def only(self) -> Episode:
        (episode,) = self.episodes
        return episode

    @property
    def reasons(self) -> list[Any]:
        return [episode.stop_reason for episode in self.episodes]

    @property
    def record(self) -> SimpleNamespace:
        """What is known of the episodes, a list of each."""
        names = {
            "turn_spans": "turn_spans", "terminated": "terminated", "stop_reasons": "stop_reason",
            "success": "success", "valid_actions": "valid_actions", "messages": "messages",
            "final_rewards": "final_reward", "env_types": "env_type", "has_turn_rewards": "has_turn_rewards",
            "trains": "trains", "errors": "error",
        }  # fmt: skip
        lists = {name: [getattr(e, of) for e in self.episodes] for name, of in names.items()}
        lists["truncated"] = [not flag for flag in lists["terminated"]]
        paid = [episode.turn_rewards for episode in self.episodes]
        return SimpleNamespace(
            **lists,
            turn_rewards=paid if any(lists["has_turn_rewards"]) else None,
            tool_calls=sum(episode.tool_calls for episode in self.episodes),
            tool_failures=sum(episode.tool_failures for episode in self.episodes),
            wait_seconds=self.durations.waiting,
            env_seconds=self.durations.environments,
            generation_seconds=self.durations.generation,
        )

    @property
    def result(self) -> dict[str, Any]:
        """Of each episode: tokens before, tokens after, log-probabilities, who has said them."""
        known = all(e.has_logprobs for e in self.episodes)
        return {
            "prompt_ids": [e.prompt_ids for e in self.episodes],
            "completion_ids": [e.ids for e in self.episodes],
            "logprobs": [e.logprobs for e in self.episodes] if known else None,
            "env_mask": [[int(flag) for flag in e.action_mask] for e in self.episodes],
        }


def play(
    engine: RolloutEngine,
    script: Script | ScriptedBackend,
    rows: Sequence[dict[str, Any]] = ({},),
    prompts: Sequence[Any] | None = None,
    seed: tuple[int, ...] = (0,),
    first_row: int = 0,
) -> Played:
    """One rollout; afterwards the backend holds nothing."""
    backend = script if isinstance(script, ScriptedBackend) else ScriptedBackend(script)
    prompts = [PROMPT for _ in rows] if prompts is None else prompts
    episodes, durations = engine.run(rows, prompts, RENDERER, backend, seed, first_row)
    assert not backend.held
    assert not backend.busy
    return Played(episodes, durations, backend)


def play_once(factory: Any, script: Script, *, prompts: Any = None, **options: Any) -> Played:
    """One episode on an engine of its own."""
    return play(build(factory, **options), script, prompts=prompts)


def shown(episode: Episode) -> str:
    """The row as text, "|" between prompt and completion."""
    return f"{text(episode.prompt_ids)}|{text(episode.ids)}"


def indices(marks: str) -> list[int]:
    """A turn index from its digits, "." where there is no turn."""
    return [-1 if mark == "." else int(mark) for mark in marks if mark != " "]


def collect(calls: EnvironmentCalls, count: int) -> dict[int, Any]:
    """Results of so many calls, by their key."""
    results: dict[int, Any] = {}
    until = time.monotonic() + PATIENCE
    while len(results) < count and time.monotonic() < until:
        for result in calls.poll(0.2):
            assert result.key not in results
            results[result.key] = result
    assert len(results) == count
    return results


def environment_threads() -> list[threading.Thread]:
    """Threads in which the test's environments run."""
    named = [t for t in threading.enumerate() if t.name.startswith("environment")]
    return [t for t in named if t not in EARLIER]
