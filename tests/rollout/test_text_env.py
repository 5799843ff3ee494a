"""Episodes of text environments, token by token, with a scripted model.

`[` and `]` are the chat template's markers; `]` ends a turn. An observation "x" after a finished turn
reads "[u x][a ", ten tokens less or more.
"""

from __future__ import annotations

import pytest
from trl_stppo.rollout.text_env import Limits, TextEnvRollout

from tests.episodes import (
    EOS,
    TOKENIZER,
    ScriptedEnv,
    ScriptedModel,
    digits,
    done,
    going,
    text,
)
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.rollout.record import RolloutRecord, StopReason

PROMPT = [{"role": "user", "content": "q"}]


def play(envs, model, *, rows=None, prompts=None, turns=None, turn_tokens=None, tokens=100):
    """Run one episode per environment; returns TRL's result and the record."""
    waiting = list(envs)
    rollout = TextEnvRollout({None: lambda: waiting.pop(0)}, Limits(turns, turn_tokens, tokens))
    rows = rows or [{} for _ in envs]
    record = RolloutRecord()
    prompts = prompts or [PROMPT for _ in envs]
    result = rollout.run(rows, prompts, ChatRenderer(TOKENIZER, [EOS]), model, record)
    return result, record


# (environment, turns, limits) -> (tokens, mask, spans, stop reason); one episode each
EPISODES = {
    "three turns, the last one terminates": (
        [going("x"), going("yz"), done()],
        ["ab]", "c]", "def]"],
        {},
        (
            "ab][u x][a c][u yz][a def]",
            "111 00000000 11 000000000 1111",
            [(0, 3), (11, 13), (22, 26)],
        ),
        StopReason.TERMINATED,
    ),
    "an empty observation still lies between two turns": (
        [going(""), going("x"), done()],
        ["a]", "b]", "c]"],
        {},
        ("a][u ][a b][u x][a c]", "11 0000000 11 00000000 11", [(0, 2), (9, 11), (19, 21)]),
        StopReason.TERMINATED,
    ),
    "a turn cut by its limit: the end of turn belongs to the observation": (
        [going("x"), going("y"), done()],
        ["abcdef]", "g]", "hij]"],
        {"turn_tokens": 3},
        (
            "abc][u x][a g][u y][a hij",
            "111 000000000 11 00000000 111",
            [(0, 3), (12, 14), (22, 25)],
        ),
        StopReason.TERMINATED,
    ),
    "the limit on turns": (
        [going("x"), going("y"), going("z")],
        ["a]", "b]", "c]"],
        {"turns": 3},
        ("a][u x][a b][u y][a c]", "11 00000000 11 00000000 11", [(0, 2), (10, 12), (20, 22)]),
        StopReason.MAX_TURNS,
    ),
    "a turn cut by the budget of the episode": (
        [going("x"), going("y")],
        ["ab]", "cdefg]"],
        {"tokens": 14},
        ("ab][u x][a cde", "111 00000000 111", [(0, 3), (11, 14)]),
        StopReason.TOKEN_BUDGET,
    ),
    "an observation that would leave no room is dropped": (
        [going("x"), going("y")],
        ["ab]"],
        {"tokens": 11},
        ("ab]", "111", [(0, 3)]),
        StopReason.TOKEN_BUDGET,
    ),
    "an observation that leaves room for one token": (
        [going("x"), going("y")],
        ["ab]", "c]"],
        {"tokens": 12},
        ("ab][u x][a c", "111 00000000 1", [(0, 3), (11, 12)]),
        StopReason.TOKEN_BUDGET,
    ),
    "the environment cuts the episode": (
        [going("x"), ("y", 0.0, False, True, {})],
        ["a]", "b]"],
        {},
        ("a][u x][a b]", "11 00000000 11", [(0, 2), (10, 12)]),
        StopReason.TRUNCATED,
    ),
    "an end that is both is the task's own": (
        [("y", 0.0, True, True, {})],
        ["a]"],
        {},
        ("a]", "11", [(0, 2)]),
        StopReason.TERMINATED,
    ),
    "terminating on the last allowed turn and token is terminating": (
        [done()],
        ["abcdef"],
        {"turns": 1, "tokens": 4},
        ("abcd", "1111", [(0, 4)]),
        StopReason.TERMINATED,
    ),
}


@pytest.mark.parametrize("case", EPISODES)
def test_an_episode_is_recorded_token_by_token(case):
    steps, turns, limits, (tokens, mask, spans), reason = EPISODES[case]
    model = ScriptedModel(*[[turn] for turn in turns])
    result, record = play([ScriptedEnv(*steps)], model, **limits)
    assert [text(c) for c in result["completion_ids"]] == [tokens]
    assert result["env_mask"] == [digits(mask)]
    assert record.turn_spans == [spans]
    assert record.stop_reasons == [reason]
    assert record.terminated == [reason is StopReason.TERMINATED]
    assert record.truncated == [reason is not StopReason.TERMINATED]
    assert text(result["prompt_ids"][0]) == "[u q][a "
    assert result["logprobs"] is None


def test_rows_only_grow_at_their_end():
    model = ScriptedModel(["abc]"], ["d]"], ["ef]"])
    result, _ = play([ScriptedEnv(going("x"), going(""), done())], model)
    final = text(result["prompt_ids"][0] + result["completion_ids"][0])
    shown = [prompt for (prompt,) in model.prompts]
    assert shown == ["[u q][a ", "[u q][a abc][u x][a ", "[u q][a abc][u x][a d][u ][a "]
    assert all(final.startswith(prompt) for prompt in shown)


def test_episodes_of_different_lengths_run_side_by_side():
    envs = [
        ScriptedEnv(done(1.0)),
        ScriptedEnv(going("x", 0.5), done(-1.0)),
        ScriptedEnv(going("y"), going("z", 2.0), done(3.0)),
    ]
    model = ScriptedModel(["a]", "b]", "c]"], ["d]", "e]"], ["f]"])
    result, record = play(envs, model)
    assert [text(c) for c in result["completion_ids"]] == [
        "a]",
        "b][u x][a d]",
        "c][u y][a e][u z][a f]",
    ]
    assert record.turn_rewards == [[1.0], [0.5, -1.0], [0.0, 2.0, 3.0]]
    assert [env.actions for env in envs] == [["a"], ["b", "d"], ["c", "e", "f"]]


def test_generation_gets_the_largest_limit_and_each_episode_its_own():
    envs = [ScriptedEnv(going("long one"), done()), ScriptedEnv(going("x"), done())]
    model = ScriptedModel(["a]", "b]"], ["cdefghijklm]", "nopqrstuvwx]"])
    result, record = play(envs, model, tokens=20)
    # 20 tokens less "a][u long one][a " (17) and "b][u x][a " (10)
    assert model.limits == [20, 10]
    assert [text(c) for c in result["completion_ids"]] == [
        "a][u long one][a cde",
        "b][u x][a nopqrstuvw",
    ]
    assert record.stop_reasons == [StopReason.TERMINATED] * 2


def test_a_turn_limit_caps_what_is_asked_of_the_model():
    model = ScriptedModel(["abc"], ["def"])
    play([ScriptedEnv(going("x"), done())], model, turn_tokens=3)
    assert model.limits == [3, 3]


def test_logprobs_follow_the_ids_with_zeros_at_observations():
    model = ScriptedModel(["ab]"], ["cdef]"], logprobs=True)
    result, _ = play([ScriptedEnv(going("x"), done())], model, tokens=13)
    assert text(result["completion_ids"][0]) == "ab][u x][a cd"
    assert result["logprobs"] == [[-1.0, -2.0, -3.0, *[0.0] * 8, -1.0, -2.0]]


def test_string_prompts_get_bare_observations():
    env = ScriptedEnv(going(" more "), done(), opening=("go: ", {}))
    model = ScriptedModel(["ab"], ["c"])
    result, record = play([env], model, prompts=["do "])
    assert text(result["prompt_ids"][0]) == "do go: "
    assert text(result["completion_ids"][0]) == "ab more c"
    assert record.turn_spans == [[(0, 2), (8, 9)]]


def test_adjacent_turns_without_any_observation_token_stay_two_turns():
    model = ScriptedModel(["ab"], ["c"])
    result, record = play([ScriptedEnv(going(""), done())], model, prompts=["do "])
    assert text(result["completion_ids"][0]) == "abc"
    assert result["env_mask"] == [[1, 1, 1]]
    assert record.turn_spans == [[(0, 2), (2, 3)]]


def test_what_info_says_is_recorded():
    envs = [
        ScriptedEnv(going("", valid_action=True), done(success=True, valid_action=False)),
        ScriptedEnv(going(""), done(success=False)),
        ScriptedEnv(going(""), done()),
    ]
    model = ScriptedModel(["a]"] * 3, ["b]"] * 3)
    _, record = play(envs, model)
    assert record.success == [True, False, None]
    assert record.valid_actions == [[True, False], [], []]


@pytest.mark.parametrize("opening", [("hi", {}), "hi"])
def test_reset_gets_the_row_and_its_observation_joins_the_prompt(opening):
    env = ScriptedEnv(done(), opening=opening)
    row = {"prompt": PROMPT, "answer": 42}
    result, _ = play([env], ScriptedModel(["a]"]), rows=[row])
    assert env.rows == [row]
    assert text(result["prompt_ids"][0]) == "[u qhi][a "


@pytest.mark.parametrize("opening", [None, "", ("", {})])
def test_reset_may_have_nothing_to_say(opening):
    result, _ = play([ScriptedEnv(done(), opening=opening)], ScriptedModel(["a]"]))
    assert text(result["prompt_ids"][0]) == "[u q][a "


def test_time_in_environments_and_in_generation_is_measured():
    _, record = play([ScriptedEnv(done())], ScriptedModel(["a]"]))
    assert record.env_seconds > 0
    assert record.generation_seconds > 0
