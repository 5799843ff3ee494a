"""Tool environments, turn by turn: what calls return to the model, and how turns are paid.

TRL's contract: the synchronous calls in their order, then the asynchronous ones together; a call that
raises, or that cannot be carried out, answers with `{"error": ...}`; all else is passed on as a str.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

from tests.rollout_kit import (
    FORMAT,
    build,
    parse,
    play,
    play_once,
    requested,
    says,
    shown,
    wait_until,
)
from trl_stppo.rollout.tool_driver import ToolFormat


class Tools:
    """Synchronous and asynchronous tools, and what they did in which order."""

    def reset(self, **row):
        self.log = []

    def look(self, x: str) -> str:
        """Look.

        Args:
            x: where.
        """
        self.log.append(f"look {x}")
        return f"saw {x}"

    async def ask(self, x: str) -> str:
        """Ask; the earlier in the alphabet, the later the answer.

        Args:
            x: what.
        """
        self.log.append(f"ask {x}")
        await asyncio.sleep(0.05 if x == "a" else 0.0)
        self.log.append(f"told {x}")
        return f"told {x}"

    def fail(self, x: str = "") -> str:
        """Fail.

        Args:
            x: how.
        """
        raise {"key": KeyError, "exit": SystemExit, "stop": KeyboardInterrupt}.get(x, OSError)(x)

    async def fail_later(self, x: str = "") -> str:
        """Fail later.

        Args:
            x: how.
        """
        await asyncio.sleep(0)
        return self.fail(x)

    def give(self, x: str) -> str:
        """Return something that is no text.

        Args:
            x: what.
        """
        things = {
            "none": None,
            "list": [{"type": "text", "text": "t"}],
            "bytes": b"b",
            "tuple": (1,),
        }
        return things[x]

    def step(self, x: str) -> str:
        """Go.

        Args:
            x: where to.
        """
        return f"went {x}"

    def _hidden(self, x: str) -> str:
        return "never"


def answers(turn, factory=Tools, **options):
    """What the tools of one turn answered, in order, and the whole of it."""
    played = play_once(factory, says([turn, "end]"]), **options)
    messages = [m for m in played.record.messages[0] if m["role"] == "tool"]
    return [(m["name"], m["content"]) for m in messages], played


@pytest.mark.parametrize(
    ("turn", "expected", "malformed"),
    [
        ("!look a;look b]", [("look", "saw a"), ("look", "saw b")], False),
        ("!ask a;ask b]", [("ask", "told a"), ("ask", "told b")], False),
        (
            "!ask a;look b;ask c;look d]",
            [("look", "saw b"), ("look", "saw d"), ("ask", "told a"), ("ask", "told c")],
            False,
        ),
        (
            "!jump x;ask b;look a]",
            [("jump", "{'error': 'Tool jump not found.'}"), ("look", "saw a"), ("ask", "told b")],
            True,
        ),
        ("!reset]", [("reset", "{'error': 'Tool reset not found.'}")], True),
        ("!_hidden x]", [("_hidden", "{'error': 'Tool _hidden not found.'}")], True),
        (
            "!look]",
            [
                (
                    "look",
                    "{'error': \"Tools.look() missing 1 required positional argument: 'x'\"}",
                )
            ],
            True,
        ),
        # A call that does not fit fails at once, so among the synchronous ones.
        (
            "!ask b;ask;look a]",
            [
                ("ask", "{'error': \"Tools.ask() missing 1 required positional argument: 'x'\"}"),
                ("look", "saw a"),
                ("ask", "told b"),
            ],
            True,
        ),
        (
            "!fail one;look a]",
            [("fail", "{'error': 'one'}"), ("look", "saw a")],
            False,
        ),
        ("!fail key]", [("fail", "{'error': \"'key'\"}")], False),
        (
            "!fail_later one;ask b]",
            [("fail_later", "{'error': 'one'}"), ("ask", "told b")],
            False,
        ),
        ("!give none;give bytes]", [("give", "None"), ("give", "b'b'")], False),
        ("!give tuple]", [("give", "(1,)")], False),
        ("!give list]", [("give", [{"type": "text", "text": "t"}])], False),
        ("!step x]", [("step", "went x")], False),
    ],
)
def test_a_turn_is_answered_as_by_trl(turn, expected, malformed):
    answered, played = answers(turn)
    assert answered == expected
    assert played.reasons == ["no_action"]
    assert played.record.valid_actions == [[not malformed, True]]
    assert played.record.tool_calls == len(expected)
    failures = sum(isinstance(answer, str) and "'error'" in answer for _, answer in expected)
    assert played.record.tool_failures == failures
    # Tokens and messages tell the same.
    said = "".join(f"[t {content}]" for _, content in expected)
    assert shown(played.only) == f"[u q][a |{turn}{said}[a end]"


def test_asynchronous_calls_run_together_after_the_synchronous_ones():
    _, played = answers("!ask a;look x;ask b]")
    assert played.only.env.log == ["look x", "ask a", "ask b", "told b", "told a"]
    _, played = answers("!ask a;ask b]")
    assert played.only.env.log == ["ask a", "ask b", "told b", "told a"]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ({"type": "custom", "name": "look"}, ("look", "Unsupported tool call type: custom")),
        ({"type": "custom"}, ("unknown", "Unsupported tool call type: custom")),
        ({"name": "look", "arguments": {}}, ("look", "Unsupported tool call type: None")),
        (requested("look", y=1), ("look", "got an unexpected keyword argument 'y'")),
        (
            {"type": "function", "function": {"name": "look", "arguments": "x"}},
            ("look", "argument after ** must be a mapping, not str"),
        ),
        (
            {"type": "function", "function": {"name": "ask", "arguments": None}},
            ("ask", "argument after ** must be a mapping, not NoneType"),
        ),
        (
            {"type": "function", "function": {"name": "look", "arguments": {"self": 1, "x": 2}}},
            ("look", "got multiple values for argument 'self'"),
        ),
    ],
)
def test_calls_of_a_strange_form_are_answered_and_counted_as_malformed(call, answer):
    def read(turn, before, tools):
        message = parse(turn, before, tools)
        return {**message, "tool_calls": [call]} if "tool_calls" in message else message

    ((name, content),), played = answers("!x]", tool_format=ToolFormat(read, FORMAT.suffix))
    assert (name, answer[1] in content, content[:10]) == (answer[0], True, "{'error': ")
    assert played.record.valid_actions == [[False, True]]
    assert played.record.tool_failures == 1


@pytest.mark.parametrize("tool", ["fail", "fail_later"])
@pytest.mark.parametrize("error", ["exit", "stop"])
def test_leaving_the_program_is_a_failure_of_the_environment(tool, error):
    engine = build(Tools)
    turn = f"!{tool} {error};look later]"
    played = play(engine, says([turn], ["!look a]", "b]"], ["!ask b]", "b]"]), [{}] * 3)
    assert played.reasons == ["env_error", "no_action", "no_action"]
    assert played.record.errors[0] in (f"SystemExit: {error}", f"KeyboardInterrupt: {error}")
    # What comes after it in the same turn is not carried out; asynchronous calls come last.
    assert played.episodes[0].env.log == (["look later"] if tool == "fail_later" else [])
    engine.close()


def test_parsing_is_told_the_turn_and_what_was_before_it():
    seen = []

    def read(turn, before, tools):
        seen.append((list(turn), list(before), [tool.__name__ for tool in tools]))
        return parse(turn, before, tools)

    _, played = answers("!look a]", tool_format=ToolFormat(read, FORMAT.suffix))
    row = played.only.prompt_ids + played.only.ids
    names = ["ask", "fail", "fail_later", "give", "look", "step"]
    assert seen == [(row[8:16], row[:8], names), (row[-4:], row[:-4], names)]


def plain(x: str) -> str:
    """Say it.

    Args:
        x: what.
    """
    return f"plain {x}"


async def plain_async(x: str) -> str:
    """Say it later.

    Args:
        x: what.
    """
    await asyncio.sleep(0)
    return f"later {x}"


def test_tools_without_an_environment():
    answered, played = answers("!plain_async a;plain b]", None, standalone=[plain, plain_async])
    assert answered == [("plain", "plain b"), ("plain_async", "later a")]
    assert played.only.env is None
    assert played.record.turn_rewards is None
    assert played.record.env_types == ["tools"]
    assert played.record.final_rewards == [None]


def test_tools_of_an_environment_hide_standalone_ones_of_their_name():
    def look(x: str) -> str:
        """Look elsewhere.

        Args:
            x: where.
        """
        return "elsewhere"

    answered, _ = answers("!look a;plain b]", standalone=[look, plain])
    assert answered == [("look", "saw a"), ("plain", "plain b")]


# ----------------------------------------------------------------------- rewards


class Paying(Tools):
    """`pay` appends, `late` makes `get_reward` append; `early` is there after `reset`."""

    early: tuple = ()

    def reset(self, **row):
        super().reset()
        self.turn_rewards = list(self.early)
        self.late = []

    def pay(self, x: str) -> str:
        """Earn.

        Args:
            x: rewards, separated by commas.
        """
        self.turn_rewards += [float(number) for number in x.split(",")]
        return "ok"

    def set(self, x: str) -> str:
        """Write to the list as one should not.

        Args:
            x: what.
        """
        strange = {"shrink": self.turn_rewards[:-1], "tuple": (1.0,), "none": [None], "str": ["1"]}
        self.turn_rewards = strange[x] if x in strange else [*self.turn_rewards, float(x)]
        return "ok"

    def owe(self, x: str) -> str:
        """Earn at the end.

        Args:
            x: how much.
        """
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
    assert (played.record.pays_turns, played.record.final_rewards) == ([True], [None])


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
@pytest.mark.parametrize(
    ("score", "final", "error"),
    [
        (3, 3.0, None),
        (None, None, None),
        (math.nan, None, "ValueError: `Kind.get_reward()` is nan"),
        ("1", None, "ValueError: `Kind.get_reward()` is '1'"),
        (OSError("no"), None, "OSError: no"),
        (SystemExit(2), None, "SystemExit: 2"),
    ],
)
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
    assert asked.count("get_reward") <= 2  # to see whether it is asynchronous, and to call it


@pytest.mark.parametrize("kind", [Paying, Scoring, ScoringLater])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("shrink", "turn_rewards` shrank from 1 to 0 entries"),
        ("tuple", "turn_rewards` is a tuple; it must be a list"),
        ("none", "turn_rewards[-1]` is None"),
        ("str", "turn_rewards[-1]` is '1'"),
        ("nan", "turn_rewards[-1]` is nan"),
        ("-inf", "turn_rewards[-1]` is -inf"),
    ],
)
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
            """Look.

            Args:
                x: where.
            """
            self.turn_rewards = [5.0]
            return x

    engine = build({"none": Tools, "score": ScoreOnly, "pays": Paying, "later": LaterOnly})
    rows = [{"environment": name} for name in ("none", "score", "pays", "later")]
    played = play(engine, lambda row, turn: "!look a]" if turn == 0 else "end]", rows)
    assert played.record.pays_turns == [False, False, True, True]
    assert played.record.final_rewards == [None, 2.0, None, None]
    assert played.record.turn_rewards == [[0, 0], [0, 0], [0, 0], [5.0, 0]]
    alone = play(engine, says(["end]"]), [{"environment": "score"}])
    assert alone.record.turn_rewards is None
    engine.close()


# ----------------------------------------------------------------- given up in the middle


def test_a_call_that_was_given_up_changes_nothing_when_it_ends():
    leave, left = threading.Event(), threading.Event()

    class Stuck(Tools):
        def look(self, x: str) -> str:
            """Look.

            Args:
                x: where.
            """
            leave.wait()
            self.turn_rewards = [9.0]
            left.set()
            return x

    played = play_once(Stuck, says(["!look a]"]), env_timeout_seconds=0.1)
    assert played.reasons == ["env_timeout"]
    leave.set()
    assert left.wait(5.0)
    time.sleep(0.05)
    episode = played.only
    assert (episode.pays_turns, episode.turn_rewards, episode.messages[1:]) == (False, [0.0], [])


def test_asynchronous_calls_after_a_synchronous_one_are_cancelled_when_given_up():
    seen = []

    class Stuck(Tools):
        async def ask(self, x: str) -> str:
            """Ask.

            Args:
                x: what.
            """
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    played = play_once(Stuck, says(["!look a;ask b]"]), env_timeout_seconds=0.1)
    assert played.reasons == ["env_timeout"]
    assert wait_until(lambda: seen == ["cancelled"])


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_first_asynchronous_reset_that_leaves_the_program_spares_the_others(error):
    class Leaving(Tools):
        async def reset(self, leave, **row):
            await asyncio.sleep(0)
            super().reset()
            if leave:
                raise error(3)

    engine = build(Leaving)
    for _ in range(2):
        rows = [{"leave": n == 1} for n in range(4)]
        played = play(engine, lambda row, turn: "!ask b]" if turn == 0 else "end]", rows)
        assert played.reasons == ["no_action", "env_error", "no_action", "no_action"]
        assert played.record.errors[1] == f"{error.__name__}: 3"
    engine.close()
