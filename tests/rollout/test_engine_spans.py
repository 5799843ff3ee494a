"""Episodes of both kinds, token by token: ids, action masks, turn indices and spans by hand.

`[` and `]` are the chat template's markers; `]` ends a turn. After a finished turn an observation "x"
reads "[u x][a ", that of a tool "[t x][a ". In a mask the digit is the number of the turn, "." no turn.
"""

from __future__ import annotations

import pytest

from tests.kit.episodes import Echoing, ScriptedEnv, done, going, text
from tests.kit.rollout_kit import indices, play_once, says
from trl_stppo.core.turns import turn_index_from_spans
from trl_stppo.rollout.record import StopReason


class Tools(Echoing):
    """Tools that are called for what they answer."""

    def n(self) -> str:
        """Say nothing."""
        return ""


def texts(*steps):
    return lambda: ScriptedEnv(*steps)


BARE = "go "
# (factory, prompt, turns, limits) -> (ids, turn index, stop reason)
EPISODES = {
    "text: three turns, the last one terminates": (
        (texts(going("x"), going("yz"), done()), None, ["ab]", "c]", "def]"], {}),
        "ab][u x][a c][u yz][a def]", "000 ........ 11 ......... 2222", StopReason.TERMINATED,
    ),
    "bare: three turns, observations as they are": (
        (texts(going(" x "), going("yz"), done()), BARE, ["ab", "c", "def"], {}),
        "ab x cyzdef", "00 ... 1 .. 222", StopReason.TERMINATED,
    ),
    "tools: three turns, the last one calls none": (
        (Tools, None, ["!e x]", "!e y;e z]", "end]"], {}),
        "!e x][t x][a !e y;e z][t y][t z][a end]",
        "00000 ........ 111111111 ............. 2222", StopReason.NO_ACTION,
    ),
    "bare: adjacent turns without any token between them stay turns": (
        (texts(going(""), going(""), done()), BARE, ["ab", "c", "d"], {}),
        "abcd", "00 1 2", StopReason.TERMINATED,
    ),
    "text: a turn cut by its limit, the end of turn belongs to the observation": (
        (texts(going("x"), done()), None, ["abcdef]", "hij]"], {"max_turn_tokens": 3}),
        "abc][u x][a hij", "000 ......... 111", StopReason.TERMINATED,
    ),
    "tools: a last word that was cut is no last word": (
        (Tools, None, ["!n]", "ending]"], {"max_turn_tokens": 3}),
        "!n][t ][a end", "000 ....... 111", StopReason.MAX_TURN_TOKENS,
    ),
    "text: a turn cut by the budget, and the environment goes on": (
        (texts(going("x"), going("y")), None, ["ab]", "cdefg]"], {"max_completion_tokens": 14}),
        "ab][u x][a cde", "000 ........ 111", StopReason.TOKEN_BUDGET,
    ),
    "text: terminating on the last token of the budget is terminating": (
        (texts(done()), None, ["abcdef"], {"max_completion_tokens": 4, "max_turns": 1}),
        "abcd", "0000", StopReason.TERMINATED,
    ),
    "text: the budget ends inside an observation": (
        (texts(going("x"), done()), None, ["ab]"], {"max_completion_tokens": 7}),
        "ab][u x", "000 ....", StopReason.TOKEN_BUDGET,
    ),
    "tools: the budget ends inside an observation": (
        (Tools, None, ["!e xyz]", "b]"], {"max_completion_tokens": 12}),
        "!e xyz][t xy", "0000000 .....", StopReason.TOKEN_BUDGET,
    ),
    "tools: a call on the last token of the budget is still carried out": (
        (Tools, None, ["!e x]"], {"max_completion_tokens": 5}),
        "!e x]", "00000", StopReason.TOKEN_BUDGET,
    ),
    # The prompt "[u q][a " has 8 tokens.
    "text: the model's context ends in a turn": (
        (texts(going("x"), going("y")), None, ["ab]", "cdef]"], {"max_context_tokens": 21}),
        "ab][u x][a cd", "000 ........ 11", StopReason.TOKEN_BUDGET,
    ),
    "text: the model's context ends in an observation": (
        (texts(going("x"), going("y")), None, ["ab]"], {"max_context_tokens": 16}),
        "ab][u x]", "000 .....", StopReason.TOKEN_BUDGET,
    ),
    "text: the limit on turns": (
        (texts(going("x"), going("y")), None, ["a]", "b]"], {"max_turns": 2}),
        "a][u x][a b]", "00 ........ 11", StopReason.MAX_TURNS,
    ),
    "text: a limit on tool calls does not concern it": (
        (texts(going("x"), done()), None, ["a]", "b]"], {"max_tool_rounds": 0}),
        "a][u x][a b]", "00 ........ 11", StopReason.TERMINATED,
    ),
    "tools: the limit on rounds allows one more turn": (
        (Tools, None, ["!n]", "!n]", "!n]"], {"max_tool_rounds": 1}),
        "!n][t ][a !n]", "000 ....... 111", StopReason.MAX_TURNS,
    ),
    "tools: no round at all": (
        (Tools, None, ["!n]", "b]"], {"max_tool_rounds": 0}),
        "!n]", "000", StopReason.MAX_TURNS,
    ),
    "tools: saying the last word on the last turn": (
        (Tools, None, ["!n]", "b]"], {"max_turns": 2, "max_tool_rounds": 1}),
        "!n][t ][a b]", "000 ....... 11", StopReason.NO_ACTION,
    ),
    "text: the environment cuts the episode": (
        (texts(going("x"), ("y", 0.0, False, True, {})), None, ["a]", "b]"], {}),
        "a][u x][a b]", "00 ........ 11", StopReason.TRUNCATED,
    ),
    "text: an end that is both is the task's own": (
        (texts(("y", 0.0, True, True, {})), None, ["a]"], {"max_turns": 1}),
        "a]", "00", StopReason.TERMINATED,
    ),
}  # fmt: skip
FINAL = (StopReason.TERMINATED, StopReason.NO_ACTION)


@pytest.mark.parametrize("case", EPISODES)
def test_an_episode_is_recorded_token_by_token(case):
    (factory, prompt, turns, limits), tokens, marks, reason = EPISODES[case]
    played = play_once(factory, says(turns), prompts=prompt and [prompt], **limits)
    episode, record = played.only, played.record
    index = indices(marks)
    mask = [turn >= 0 for turn in index]
    assert text(episode.ids) == tokens
    assert episode.action_mask == mask
    assert turn_index_from_spans([episode.turn_spans], len(episode.ids)).tolist() == [index]
    assert record.stop_reasons == [reason]
    assert record.terminated == [reason in FINAL]
    assert record.errors == [None]
    assert text(episode.prompt_ids) == (prompt or "[u q][a ")
    assert played.result == {
        "prompt_ids": [episode.prompt_ids],
        "completion_ids": [episode.ids],
        "logprobs": None,
        "env_mask": [mask],
    }


def test_messages_are_the_conversation_after_the_prompt():
    said = play_once(texts(going("x"), done()), says(["ab]", "c]"])).record.messages[0]
    told = [("assistant", "ab"), ("user", "x"), ("assistant", "c")]
    assert [(m["role"], m["content"]) for m in said] == told
    said = play_once(Tools, says(["!e x;n]", "c]"])).record.messages[0]
    told = [("assistant", "!e x;n"), ("tool", "x"), ("tool", ""), ("assistant", "c")]
    assert [(m["role"], m["content"]) for m in said] == told
