"""Tool environments, turn by turn: what calls return to the model.

TRL's contract: the synchronous calls in their order, then the asynchronous ones together; a call that
raises, or that cannot be carried out, answers with `{"error": ...}`. All results but text are JSON, which
TRL's are not.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.kit.rollout_kit import build, parse, play, play_once, requested, says, shown
from tests.kit.waiting import PATIENCE, wait_until


class Tools:
    """Synchronous and asynchronous tools, and what they did in which order."""

    def reset(self, **row):
        self.log = []

    def look(self, x: str) -> str:
        """Look.\n\nArgs:\n    x: where."""
        self.log.append(f"look {x}")
        return f"saw {x}"

    async def ask(self, x: str) -> str:
        """Ask; the earlier in the alphabet, the later the answer.\n\nArgs:\n    x: what."""
        self.log.append(f"ask {x}")
        await asyncio.sleep(0.05 if x == "a" else 0.0)
        self.log.append(f"told {x}")
        return f"told {x}"

    def fail(self, x: str = "") -> str:
        """Fail.\n\nArgs:\n    x: how."""
        raise {"key": KeyError, "exit": SystemExit, "stop": KeyboardInterrupt}.get(x, OSError)(x)

    async def fail_later(self, x: str = "") -> str:
        """Fail later.\n\nArgs:\n    x: how."""
        await asyncio.sleep(0)
        return self.fail(x)

    def give(self, x: str) -> str:
        """Return something that is no text.\n\nArgs:\n    x: what."""
        things = {"none": None, "tuple": (1,)}
        things["list"] = ["a", {"b": "e"}]
        things["blocks"] = [{"type": "text", "text": "t"}, {"type": "text", "text": "u"}]
        things["image"] = [{"type": "image", "image": "a.png"}]
        return things[x]

    def step(self, x: str) -> str:
        """Go.\n\nArgs:\n    x: where to."""
        return f"went {x}"

    def hush(self) -> str:
        """Be quiet."""

    def _hidden(self, x: str) -> str:
        return "never"


def answers(turn, factory=Tools, **options):
    """What the tools of one turn answered, in order, and the whole of it."""
    played = play_once(factory, says([turn, "end]"]), **options)
    messages = [m for m in played.record.messages[0] if m["role"] == "tool"]
    return [(m["name"], m["content"]) for m in messages], played


NOT_FOUND = "{{'error': 'Tool {} not found.'}}"
MISSING = "{'error': \"Tools.ask() missing 1 required positional argument: 'x'\"}"


@pytest.mark.parametrize(("turn", "expected", "malformed"), [
    ("!look a;look b]", [("look", "saw a"), ("look", "saw b")], False),
    ("!ask a;ask b]", [("ask", "told a"), ("ask", "told b")], False),
    ("!ask a;look b;ask c]", [("look", "saw b"), ("ask", "told a"), ("ask", "told c")], False),
    ("!jump x;look a]", [("jump", NOT_FOUND.format("jump")), ("look", "saw a")], True),
    ("!reset]", [("reset", NOT_FOUND.format("reset"))], True),
    ("!_hidden x]", [("_hidden", NOT_FOUND.format("_hidden"))], True),
    # A call that does not fit fails at once, so among the synchronous ones.
    ("!ask b;ask;look a]", [("ask", MISSING), ("look", "saw a"), ("ask", "told b")], True),
    ("!fail one;look a]", [("fail", "{'error': 'one'}"), ("look", "saw a")], False),
    ("!fail key]", [("fail", "{'error': \"'key'\"}")], False),
    ("!fail_later a;ask b]", [("fail_later", "{'error': 'a'}"), ("ask", "told b")], False),
    ("!give none;give tuple]", [("give", "null"), ("give", "[1]")], False),
    ("!give list]", [("give", '["a", {"b": "e"}]')], False),
    ("!give blocks]", [("give", "tu")], False),
    ("!step x]", [("step", "went x")], False),
])  # fmt: skip
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


@pytest.mark.parametrize(("call", "answer"), [
    (requested("hush", y=1), ("hush", "got an unexpected keyword argument 'y'")),
    (requested("look", y=1), ("look", "got an unexpected keyword argument 'y'")),
    (
        {"type": "function", "function": {"name": "look", "arguments": "x"}},
        ("look", "argument after ** must be a mapping, not str"),
    ),
])  # fmt: skip
def test_calls_of_a_strange_form_are_answered_and_counted_as_malformed(call, answer):
    def read(turn, before, tools):
        message = parse(turn, before, tools)
        return {**message, "tool_calls": [call]} if "tool_calls" in message else message

    ((name, content),), played = answers("!x]", parse=read)
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
    said = played.record.errors[0].partition(" (")[0]
    assert said in (f"SystemExit: {error}", f"KeyboardInterrupt: {error}")
    # What comes after it in the same turn is not carried out; asynchronous calls come last.
    assert played.episodes[0].env.log == (["look later"] if tool == "fail_later" else [])


def test_parsing_is_told_the_turn_and_what_was_before_it():
    seen = []

    def read(turn, before, tools):
        seen.append((list(turn), list(before), [tool["function"]["name"] for tool in tools]))
        return parse(turn, before, tools)

    _, played = answers("!look a]", parse=read)
    row = played.only.prompt_ids + played.only.ids
    names = ["ask", "fail", "fail_later", "give", "hush", "look", "step"]
    assert seen == [(row[8:16], row[:8], names), (row[-4:], row[:-4], names)]


def test_a_tool_may_not_answer_with_an_image_to_a_policy_of_text():
    _, played = answers("!give image]")
    assert played.reasons == ["env_error"]
    assert "The tool `give` returned an image" in played.record.errors[0]


def plain(x: str) -> str:
    """Say it.\n\nArgs:\n    x: what."""
    return f"plain {x}"


async def plain_async(x: str) -> str:
    """Say it later.\n\nArgs:\n    x: what."""
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
        """Look elsewhere.\n\nArgs:\n    x: where."""
        return "elsewhere"

    answered, _ = answers("!look a;plain b]", standalone=[look, plain])
    assert answered == [("look", "saw a"), ("plain", "plain b")]


def test_a_call_that_was_given_up_changes_nothing_when_it_ends():
    leave, left = threading.Event(), threading.Event()

    class Stuck(Tools):
        def look(self, x: str) -> str:
            """Look.\n\nArgs:\n    x: where."""
            leave.wait()
            self.turn_rewards = [9.0]
            left.set()
            return x

    played = play_once(Stuck, says(["!look a]"]), env_timeout_seconds=0.1)
    assert played.reasons == ["env_timeout"]
    leave.set()
    assert left.wait(PATIENCE)
    time.sleep(0.05)
    episode = played.only
    assert (episode.has_turn_rewards, episode.turn_rewards, episode.messages[1:]) == (
        False,
        [0.0],
        [],
    )


def test_asynchronous_calls_after_a_synchronous_one_are_cancelled_when_given_up():
    seen = []

    class Stuck(Tools):
        async def ask(self, x: str) -> str:
            """Ask.\n\nArgs:\n    x: what."""
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    played = play_once(Stuck, says(["!look a;ask b]"]), env_timeout_seconds=0.1)
    assert played.reasons == ["env_timeout"]
    assert wait_until(lambda: seen == ["cancelled"])
