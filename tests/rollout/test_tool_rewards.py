"""How tool environments pay: `turn_rewards` between two turns, `get_reward` at the end."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.kit.rollout_kit import build, play, play_once, says


class Tools:
    """One tool, no pay."""

    def reset(self, **row):
        return None

    def look(self, x: str) -> str:
        """Look.\n\nArgs:\n    x: where."""
        return x


class Paying(Tools):
    """`pay` appends, `late` makes `get_reward` append; `early` is there after `reset`."""

    early: tuple = ()

    def reset(self, **row):
        self.turn_rewards = list(self.early)
        self.late = []

    def pay(self, x: str) -> str:
        """Earn.\n\nArgs:\n    x: rewards, separated by commas."""
        self.turn_rewards += [float(number) for number in x.split(",")]
        return "ok"

    def set(self, x: str) -> str:
        """Write to the list as one should not.\n\nArgs:\n    x: what."""
        strange = {"shrink": self.turn_rewards[:-1], "tuple": (1.0,), "none": [None], "str": ["1"]}
        self.turn_rewards = strange[x] if x in strange else [*self.turn_rewards, float(x)]
        return "ok"

    def owe(self, x: str) -> str:
        """Earn at the end.\n\nArgs:\n    x: how much."""
        self.late.append(float(x))
        return "ok"


class Scoring(Paying):
    score = 7

    def get_reward(self):
        self.turn_rewards += self.late
        if isinstance(self.score, BaseException):
            raise self.score
        return self.score


class ScoringLater(Scoring):
    async def get_reward(self):
        await asyncio.sleep(0)
        return super().get_reward()


def test_entries_belong_to_the_turn_in_which_they_were_appended():
    played = play_once(Paying, says(["!pay 1,0.5;pay 2]", "!look a]", "!pay -1]", "end]"]))
    assert played.record.turn_rewards == [[3.5, 0.0, -1.0, 0.0]]
    assert (played.record.has_turn_rewards, played.record.final_rewards) == ([True], [None])


def test_what_reset_appends_belongs_to_the_first_turn():
    class Early(Paying):
        early = (4.0,)

    played = play_once(Early, says(["!pay 1]", "!pay 2]", "end]"]))
    assert played.record.turn_rewards == [[5.0, 2.0, 0.0]]
    assert play_once(Early, says(["end]"])).record.turn_rewards == [[4.0]]


@pytest.mark.parametrize("kind", [Scoring, ScoringLater])
def test_what_get_reward_appends_belongs_to_the_last_turn(kind):
    played = play_once(kind, says(["!pay 1;owe 3]", "!pay 2]", "end]"]))
    assert played.record.turn_rewards == [[1.0, 2.0, 3.0]]
    assert played.record.final_rewards == [7.0]
    cut = play_once(kind, says(["!pay 1;owe 3]", "!pay 2]"]), max_turns=2)
    assert (cut.record.turn_rewards, cut.record.final_rewards) == ([[1.0, 5.0]], [7.0])
    assert cut.reasons == ["max_turns"]


@pytest.mark.parametrize("kind", [Scoring, ScoringLater])
@pytest.mark.parametrize(("score", "final", "error"), [
    (3, 3.0, None),
    (None, None, None),
    (math.nan, None, "ValueError: `Kind.get_reward()` must be a finite number; got nan"),
    ("1", None, "ValueError: `Kind.get_reward()` must be a finite number; got '1'"),
    (OSError("no"), None, "OSError: no"),
    (SystemExit(2), None, "SystemExit: 2"),
])  # fmt: skip
def test_get_reward_is_asked_once_and_checked(kind, score, final, error):
    asked = []

    class Kind(kind):
        def __getattribute__(self, name):
            if name == "get_reward":
                asked.append(name)
            return super().__getattribute__(name)

    Kind.score = score
    played = play_once(Kind, says(["end]"]))
    assert played.record.final_rewards == [final]
    assert played.reasons == ["no_action" if error is None else "env_error"]
    (told,) = played.record.errors
    assert told is None if error is None else told.startswith(error)
    assert asked.count("get_reward") <= 2


@pytest.mark.parametrize("kind", [Paying, Scoring, ScoringLater])
@pytest.mark.parametrize(("value", "message"), [
    ("shrink", "turn_rewards` shrank to 0 entries"),
    ("tuple", "turn_rewards` is a tuple; must be a list"),
    ("none", "turn_rewards[-1]` must be a finite number; got None"),
    ("str", "turn_rewards[-1]` must be a finite number; got '1'"),
    ("nan", "turn_rewards[-1]` must be a finite number; got nan"),
    ("-inf", "turn_rewards[-1]` must be a finite number; got -inf"),
])  # fmt: skip
def test_a_list_that_is_none_ends_the_episode(kind, value, message):
    first = "!pay 1]" if value == "shrink" else "!look a]"
    played = play_once(kind, says([first, f"!set {value}]"]))
    assert played.reasons == ["env_error"]
    assert f"{kind.__name__}.{message}" in played.record.errors[0]
    assert played.record.trains == [False]


def test_environments_without_the_attribute_pay_no_turn():
    class ScoreOnly(Tools):
        def get_reward(self):
            return 2.0

    class LaterOnly(Tools):
        def look(self, x: str) -> str:
            """Look.\n\nArgs:\n    x: where."""
            self.turn_rewards = [5.0]
            return x

    engine = build({"none": Tools, "score": ScoreOnly, "pays": Paying, "later": LaterOnly})
    rows = [{"environment": name} for name in ("none", "score", "pays", "later")]
    played = play(engine, lambda row, turn: "!look a]" if turn == 0 else "end]", rows)
    assert played.record.has_turn_rewards == [False, False, True, True]
    assert played.record.final_rewards == [None, 2.0, None, None]
    assert played.record.turn_rewards == [[0, 0], [0, 0], [0, 0], [5.0, 0]]
    alone = play(engine, says(["end]"]), [{"environment": "score"}])
    assert alone.record.turn_rewards is None
