"""Demonstrations for the search agent: a scripted player in the real environment.

Two things are taught. Copying: most questions are about made-up names, because a small model
shown real names only learns those names by heart. And a mixture of behaviours of which only some
pay, so that reinforcement learning has something to choose from: `Mixture` holds the odds.
"""

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stdlib_questions import (
    QUESTIONS,
    TWO_HOP_KINDS,
    Entry,
    entries,
    is_held_out,
)

sys.path.append(str(Path(__file__).parents[1] / "search"))
from search_env.env import StdlibSearchEnv
from search_env.retrieval import Passage, Retriever

GENERIC_QUERIES = ("module", "class", "function", "method", "base")
# Never a name: answers drawn from names, or taken from the wrong place in a passage, teach a small
# model to make names up and blur which field a question asks for. Reinforcement would then have to
# teach what the warm start has spoilt.
GIVE_UP = "unknown"
MALFORMED = (
    "I am not sure.",
    "Let me think about it.",
    "I should look it up.",
    "It is in the standard library.",
)
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SYLLABLES = tuple(c + v for c in "bcdfghjklmnprstvwxyz" for v in "aeiou")


@dataclass(frozen=True)
class Mixture:
    """Odds of each behaviour in each state; they need not add up to one.

    States: `blind` (nothing useful has been shown), `halfway` (the first of two passages has been
    shown) and `informed` (the passage with the answer has been shown). Behaviours part at the first
    token or two of a turn, and only right ones copy a name that has been shown.
    """

    blind: dict[str, float] = field(
        default_factory=lambda: {"search": 45, "give_up": 25, "generic": 10, "malformed": 20}
    )
    halfway: dict[str, float] = field(
        default_factory=lambda: {"search": 60, "give_up": 15, "again": 10, "malformed": 15}
    )
    informed: dict[str, float] = field(
        default_factory=lambda: {"answer": 65, "give_up": 15, "again": 5, "malformed": 15}
    )


EXPERT = Mixture({"search": 1}, {"search": 1}, {"answer": 1})


@dataclass(frozen=True)
class Task:
    """A question and the way to its answer."""

    question: str
    answer: str
    path: tuple[str, ...]  # what to search, one name per hop
    retriever: Retriever | None  # None: the environment's own


class TableRetriever:
    """A made-up world: a passage per known name, unrelated ones for any other query."""

    def __init__(self, table: dict[str, list[Passage]], unrelated: list[Passage]) -> None:
        self._table = table
        self._unrelated = unrelated

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return the passages of the name, or the unrelated ones for a generic query."""
        if query in self._table:
            return self._table[query][:top_k]
        return self._unrelated[:top_k] if query in GENERIC_QUERIES else []


class TaskSource:
    """Draws tasks: about made-up names, or about real ones of the train split."""

    def __init__(self, rng: random.Random, real_share: float) -> None:
        """Prepare the pools of names and summaries.

        Args:
            rng: the only source of chance.
            real_share: share of tasks about the real standard library, 0 to 1.
        """
        self._rng = rng
        self._real_share = real_share
        known = [entry for entry in entries() if not is_held_out(entry.name)]
        self._summaries = [entry.summary for entry in known]
        self._modules = [entry.module for entry in known if entry.kind != "module"]
        self._bases = [entry.base for entry in known if entry.base] or ["object"]
        self._pieces = sorted({piece for entry in known for piece in _PIECE.findall(entry.name)})
        self._real = _real_tasks(known)

    def draw(self) -> Task:
        """One task, every kind as often: what is rare here is mixed up with its neighbour later."""
        rng = self._rng
        kind = rng.choice(list(QUESTIONS))
        if self._real[kind] and rng.random() < self._real_share:
            return rng.choice(self._real[kind])
        return self._made_up(kind)

    def name(self, style: str) -> str:
        """A made-up identifier.

        Args:
            style: "snake" (functions), "camel" (classes) or "dotted" (modules).
        """
        rng = self._rng
        parts = [self._piece() for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        if style == "camel":
            text = "".join(part[:1].upper() + part[1:] for part in parts)
        elif style == "dotted":
            text = ".".join(part.lower() for part in parts[:2])
        else:
            text = rng.choice(("_", "_", "")).join(part.lower() for part in parts)
        return text[:24]

    def _piece(self) -> str:
        rng = self._rng
        if rng.random() < 0.5:
            return rng.choice(self._pieces)
        if rng.random() < 0.5:
            return "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3)))
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5)))

    def _entry(self, kind: str, name: str = "") -> Entry:
        rng = self._rng
        real_module, real_base = rng.choice(self._modules), rng.choice(self._bases)
        return Entry(
            kind=kind,  # type: ignore[arg-type]
            name=name or self.name("camel" if kind == "class" else "snake"),
            module=self.name("dotted") if rng.random() < 0.7 else real_module,
            owner=self.name("camel") if kind == "method" else "",
            base="" if kind != "class" else self._base(real_base),
            summary=rng.choice(self._summaries),
        )

    def _base(self, real: str) -> str:
        rng = self._rng
        name = self.name("camel") if rng.random() < 0.7 else real
        return f"_{name}" if rng.random() < 0.05 else name

    def _made_up(self, kind: str) -> Task:
        asked = kind.partition("_")[0]
        chain = [self._entry("class" if asked == "base" else asked)]
        if kind in TWO_HOP_KINDS:
            chain.append(self._entry("class", chain[0].owner or chain[0].base))
        table = {entry.name: self._found(entry) for entry in chain}
        # Sometimes nothing at all, which is what a misspelt name finds later on.
        others = self._rng.choices(_KINDS, k=self._rng.choice((0, 2, 2)))
        unrelated = [self._entry(other).passage() for other in others]
        return _task(kind, chain, TableRetriever(table, unrelated))

    def _found(self, entry: Entry) -> list[Passage]:
        """The passage itself, one time in four with another that happens to mention the name."""
        found = [entry.passage()]
        if self._rng.random() < 0.25:
            other = self._entry(self._rng.choice(_KINDS))
            owned = self._entry("method")
            owned = Entry("method", owned.name, owned.module, entry.name, summary=owned.summary)
            found.append((owned if entry.kind == "class" else other).passage())
        return found


_KINDS = ("class", "function", "method")


def demonstrate(task: Task, mixture: Mixture, rng: random.Random) -> list[dict]:
    """Play one episode of at most four turns.

    Returns:
        the conversation: user and assistant messages in turn, from the question to the last action.
    """
    env = StdlibSearchEnv(task.retriever)
    env.reset(answers=[task.answer])
    messages = [{"role": "user", "content": task.question}]
    seen = 0  # how many passages of the path have been shown
    for _ in range(4):
        state = "informed" if seen == len(task.path) else "halfway" if seen else "blind"
        odds: dict[str, float] = getattr(mixture, state)
        behaviour = rng.choices(list(odds), weights=list(odds.values()))[0]
        action = _action(behaviour, task, seen, rng)
        seen += behaviour == "search"
        observation, _, terminated, _, _ = env.step(action)
        messages.append({"role": "assistant", "content": action})
        if terminated:
            break
        messages.append({"role": "user", "content": observation})
    return messages[:-1] if messages[-1]["role"] == "user" else messages


def _action(behaviour: str, task: Task, seen: int, rng: random.Random) -> str:
    """Return the text of a turn. The space after a tag makes a name the same tokens here as in a sentence."""
    if behaviour == "malformed":
        return rng.choice(MALFORMED)
    if behaviour == "search":
        return f"<search> {task.path[seen]}</search>"
    if behaviour == "again":
        return f"<search> {task.path[seen - 1]}</search>"
    if behaviour == "generic":
        return f"<search> {rng.choice(GENERIC_QUERIES)}</search>"
    return f"<answer> {task.answer if behaviour == 'answer' else GIVE_UP}</answer>"


def _task(kind: str, chain: Sequence[Entry], retriever: Retriever | None) -> Task:
    last = chain[-1]
    wanted = kind.rpartition("_")[2]
    answer = {"module": last.module, "class": last.owner, "base": last.base}[wanted]
    path = tuple(entry.name for entry in chain)
    return Task(QUESTIONS[kind].format(name=path[0]), answer, path, retriever)


def _real_tasks(known: Sequence[Entry]) -> dict[str, list[Task]]:
    """Tasks from the train questions, with the entries that lead to their answers."""
    from stdlib_questions import questions

    by_name: dict[str, Entry] = {}
    for entry in entries():
        by_name.setdefault(entry.name, entry)
    tasks: dict[str, list[Task]] = {kind: [] for kind in QUESTIONS}
    for row in questions("train"):
        first = by_name[row["name"]]
        chain = [first]
        if row["hops"] == 2:
            chain.append(by_name[first.owner or first.base])
        tasks[row["kind"]].append(_task(row["kind"], chain, None))
    return tasks


def conversations(
    count: int, mixture: Mixture, *, seed: int, real_share: float = 0.2
) -> list[dict[str, Any]]:
    """Rows with one column, `messages`.

    Args:
        count: number of episodes.
        mixture: odds of the behaviours; `EXPERT` for right ones only.
        seed: the same seed gives the same rows.
        real_share: share of episodes about the real standard library (train split), 0 to 1.
    """
    rng = random.Random(seed)
    source = TaskSource(rng, real_share)
    return [{"messages": demonstrate(source.draw(), mixture, rng)} for _ in range(count)]


def drills(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Rows in which the assistant repeats four made-up names: copying and nothing else.

    Nearly every token is a lesson here, so the skill appears in a third of the steps that
    whole episodes need for it.

    Args:
        count: number of rows.
        seed: the same seed gives the same rows.
    """
    rng = random.Random(seed)
    source = TaskSource(rng, 0.0)
    rows = []
    for _ in range(count):
        styles = rng.choices(("snake", "camel", "dotted"), k=4)
        text = "".join(f" {source.name(style)}" for style in styles)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": text},
                ]
            }
        )
    return rows
