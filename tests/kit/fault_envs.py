"""Environments that fail as their row says, and watch how their instances are used.

A row has `n`, its number; `kind`, the environment's name; `turns`, how many its episode has; `fault`,
what goes wrong; and `when`, in which method: "reset", "turn" (the second one if there is one) or
"score".
"""

import random
import time
from typing import Any

from trl_stppo.rollout.record import StopReason

HANG_SECONDS = 5.0
MEGABYTE = "x" * 1_000_000
GARBAGE = ("none", "nan", "bytes", "text", "length")
NAMES = ("text", "tools")
MISUSED: list[str] = []


class Watched:
    """What all have in common: whether it is broken, and how it fails."""

    broken = False

    def _enter(self, when: str) -> str | None:
        """The fault that is due now."""
        if self.broken:
            MISUSED.append(f"{type(self).__name__} {self.row} in {when}")
        turn = when == "turn" and self.count == min(2, self.row["turns"])
        due = when == self.row["when"] and (turn or when != "turn")
        fault = self.row["fault"] if due else None
        self.broken = fault is not None and expected(self.row) in ("env_error", "env_timeout")
        return fault

    def _begin(self, row: dict[str, Any]) -> str | None:
        self.row, self.count, self.turn_rewards = row, 0, []
        return self._enter("reset")

    def _fail(self, fault: str | None) -> None:
        if fault == "error":
            raise OSError(f"broken {self.row['n']}")
        if fault == "exit":
            raise SystemExit(3)
        if fault == "hang":
            time.sleep(HANG_SECONDS)

    def _opening(self, fault: str | None) -> Any:
        strange = {"none": 3, "nan": float("nan"), "bytes": b"hi", "length": (1, 2, 3)}
        strange["text"] = MEGABYTE
        return strange.get(fault, f":{self.row['n']}")


class Text(Watched):
    """A text environment that pays the turn's number."""

    def reset(self, **row):
        fault = self._begin(row)
        self._fail(fault)
        return self._opening(fault)

    def step(self, action):
        self.count += 1
        fault = self._enter("turn")
        self._fail(fault)
        return self._said(fault, action)

    def _said(self, fault, action):
        done = self.count >= self.row["turns"]
        result = (f"{action}.{self.count}", float(self.count), done, False, {})
        strange = {
            "none": None,
            "nan": (result[0], float("nan"), False, False, {}),
            "bytes": (b"hi", *result[1:]),
            "text": (MEGABYTE, 0.0, False, False, {}),
            "length": result[:3],
        }
        return strange.get(fault, result)


class Tools(Watched):
    """A tool environment that pays half of the turn's number, and ten at the end."""

    def reset(self, **row):
        fault = self._begin(row)
        self._fail(fault)
        return self._opening(fault)

    def e(self, x: str) -> str:
        """Say it again.\n\nArgs:\n    x: what."""
        self.count += 1
        fault = self._enter("turn")
        self._fail(fault)
        return self._said(fault, x)

    def _said(self, fault, x):
        self.turn_rewards.append(float("nan") if fault == "nan" else self.count / 2)
        strange = {"none": None, "bytes": b"hi", "text": MEGABYTE, "length": (x, 1.0)}
        return strange.get(fault, f"{x}.{self.count}")

    def get_reward(self):
        fault = self._enter("score")
        self._fail(fault)
        return self._scored(fault)

    def _scored(self, fault):
        strange = {"nan": float("nan"), "bytes": b"hi", "text": MEGABYTE, "length": (1.0, 2.0)}
        return None if fault == "none" else strange.get(fault, 10.0)


FACTORIES = {"text": Text, "tools": Tools}


def draw(n: int, seed: int = 0) -> dict[str, Any]:
    """The n-th row: 5 % exceptions, 2 % hangs, 2 % garbage, 1 % SystemExit."""
    dice = random.Random(1000 * seed + n)
    name, lot = dice.choice(NAMES), dice.random()
    fault = "error" if lot < 0.05 else "hang" if lot < 0.07 else None
    if 0.07 <= lot < 0.09:
        fault = dice.choice(GARBAGE)
    elif 0.09 <= lot < 0.10:
        fault = "exit"
    when = dice.choice(("reset", "turn", "turn", "score"))
    if when == "score" and name == "text":
        when = "turn"
    turns = dice.randint(1, 4)
    return {"environment": name, "kind": name, "n": n, "turns": turns, "fault": fault, "when": when}


def expected(row: dict[str, Any]) -> StopReason:
    """How the row's episode ends."""
    fault, when = row["fault"], row["when"]
    tools = row["kind"] == "tools"
    fine = StopReason.NO_ACTION if tools else StopReason.TERMINATED
    if fault is None:
        return fine
    if fault == "hang":
        return StopReason.ENV_TIMEOUT
    if fault == "text" and when == "turn":
        return StopReason.TOKEN_BUDGET
    if tools and when == "turn" and fault in ("error", "none", "bytes", "length"):
        return fine
    if tools and when == "score" and fault == "none":
        return fine
    return StopReason.ENV_ERROR


def say(row: dict[str, Any], turn: int) -> str:
    """What the model says in the row's episode."""
    if row["kind"] != "tools":
        return f"{row['n']}t{turn}]"
    return f"bye {row['n']}]" if turn == row["turns"] else f"!e {row['n']}t{turn}]"
