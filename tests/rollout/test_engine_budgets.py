"""What an episode may use: tokens of a turn, of the episode, of the model's context."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from tests.kit import rollout_kit
from tests.kit.episodes import EOS, Echoing, ScriptedEnv, done, going, ids, text
from tests.kit.fakes import char_tokenizer
from tests.kit.rollout_kit import build, play, play_once, says, shown
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.rollout.engine import MAX_CHARS_PER_TOKEN
from trl_stppo.rollout.record import StopReason

BARE = "go "


def texts(*steps):
    return lambda: ScriptedEnv(*steps)


@pytest.mark.parametrize(("limits", "asked"), [
    # "[u q][a " has 8 tokens, "ab][u x][a " another 11.
    ({"max_completion_tokens": 16, "max_turn_tokens": 6, "max_context_tokens": 23}, [6, 4]),
    ({"max_completion_tokens": 16, "max_turn_tokens": 6, "max_context_tokens": 99}, [6, 5]),
    ({"max_completion_tokens": 16, "max_context_tokens": 23}, [15, 4]),
    ({"max_completion_tokens": 16}, [16, 5]),
])  # fmt: skip
def test_what_is_asked_of_the_backend_is_what_still_fits(limits, asked):
    played = play_once(texts(going("x")), says(["ab]", "cdefgh"]), **limits)
    assert [request.max_new_tokens for request in played.backend.requests] == asked


@pytest.mark.parametrize(("budget", "asked"), [(11, [11]), (12, [12, 1])])
def test_an_observation_that_fills_the_rest_ends_the_episode(budget, asked):
    # "ab]" and "[u x][a " have 11 tokens.
    played = play_once(texts(going("x")), says(["ab]", "c"]), max_completion_tokens=budget)
    assert [request.max_new_tokens for request in played.backend.requests] == asked
    assert played.reasons == [StopReason.TOKEN_BUDGET]
    assert len(played.only.ids) == budget


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turn_tokens": 3}, "max_turn_tokens"),
        ({"max_turn_tokens": 9, "max_completion_tokens": 3}, "token_budget"),
        ({"max_turn_tokens": 3, "max_completion_tokens": 3}, "token_budget"),
    ],
)
def test_the_limit_that_cut_a_final_turn_is_named(limits, reason):
    assert play_once(Echoing, says(["abc"]), **limits).reasons == [reason]


def test_a_step_of_the_backend_that_takes_long_is_reported_once(monkeypatch):
    engine, reports = build(texts(going("x"), going("x"), done())), []
    engine.on_progress = lambda *numbers: reports.append(numbers)
    clock = iter([0.0, 1000.0, *(1000.0 + 0.1 * step for step in range(1, 10_000))])
    fake = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr("trl_stppo.rollout.engine.time", fake)
    play(engine, says(["ab]", "c]", "d]"]), [{}])
    assert reports == [(0, 1, 0)]


class Long(Echoing):
    length = 1_000_000

    def e(self, x: str) -> str:
        """Say a lot.\n\nArgs:\n    x: what."""
        return x * self.length


@pytest.mark.parametrize(("factory", "prompt", "turn", "tokens"), [
    (texts(going("x" * 1_000_000)), None, "ab]", "ab][u " + "x" * 34),
    (texts(going("x" * 1_000_000)), BARE, "ab", "ab" + "x" * 38),
    (Long, None, "!e x]", "!e x][t " + "x" * 32),
])  # fmt: skip
def test_a_megabyte_is_cut_before_it_is_tokenised(factory, prompt, turn, tokens):
    started = time.process_time()
    played = play_once(factory, says([turn]), prompts=prompt and [prompt], max_completion_tokens=40)
    assert time.process_time() - started < 5.0
    assert text(played.only.ids) == tokens
    assert played.reasons == [StopReason.TOKEN_BUDGET]
    assert len(json.dumps(played.record.messages)) > 1_000_000


def test_text_cut_for_its_length_ends_the_episode_however_few_its_tokens(monkeypatch):
    suffix = "trl_stppo.rollout.chat.ChatRenderer.suffix_ids"
    monkeypatch.setattr(suffix, lambda renderer, messages, last: ids("[a "))
    limits = {"max_completion_tokens": 20}
    longest = (20 - 5 + 1) * MAX_CHARS_PER_TOKEN
    for length, reason, tokens in [
        (longest, "no_action", "!e x][a b]"),
        (longest + 1, "token_budget", "!e x][a "),
    ]:
        monkeypatch.setattr(Long, "length", length)
        played = play_once(Long, says(["!e x]", "b]"]), **limits)
        assert played.reasons == [reason]
        assert text(played.only.ids) == tokens


def test_a_prompt_that_fills_the_context_costs_only_its_episode():
    played = play_once(texts(done()), says(["a]"]), max_context_tokens=8)
    assert played.reasons == ["env_error"]
    assert "prompt of row 0 has 8 tokens and leaves none" in played.record.errors[0]
    assert shown(played.only) == "]|]"
    assert play_once(texts(done()), says(["a]"]), max_context_tokens=9).reasons == ["terminated"]


def test_opening_words_that_fill_the_context_cost_only_their_episode():
    engine = build(
        {"long": lambda: ScriptedEnv(opening="x" * 100), "short": texts(done())},
        max_context_tokens=60,
    )
    rows = [{"environment": "long"}, {"environment": "short"}]
    played = play(engine, says([], ["a]"]), rows)
    assert played.reasons == ["env_error", "terminated"]
    assert "prompt of row 0 has 108 tokens" in played.record.errors[0]
    assert shown(played.episodes[0]) == "[u q][a |]"
    assert played.episodes[0].action_mask == [False]


@pytest.mark.long
def test_ten_megabytes_of_opening_words_are_refused_without_being_tokenised():
    engine = build(
        {
            "text": lambda: ScriptedEnv(opening="x" * 10_000_000),
            "blocks": lambda: Greeting([{"type": "text", "text": "x" * 10_000_000}]),
            "short": texts(done()),
        },
        max_context_tokens=1000,
    )
    rows = [{"environment": name} for name in ("text", "blocks", "short")]
    started = time.process_time()
    played = play(engine, says([], [], ["a]"]), rows)
    assert time.process_time() - started < 3.0
    assert played.reasons == ["env_error", "env_error", "terminated"]
    for error in played.record.errors[:2]:
        assert "has at least 256" in error
        assert "the model's context has 1000" in error
    assert shown(played.episodes[0]) == "[u q][a |]"


class Greeting(Echoing):
    def __init__(self, opening):
        self.opening = opening

    def reset(self, **row):
        return self.opening


def test_a_long_opening_of_few_tokens_is_read_whole(monkeypatch):
    """More characters than tokens fit, and fewer tokens."""
    tokenizer, word = char_tokenizer(), "x" * 100
    tokenizer.add_tokens([word])
    monkeypatch.setattr(rollout_kit, "RENDERER", ChatRenderer(tokenizer, [EOS]))
    opening = word * 40
    factory = lambda: ScriptedEnv(done(), opening=opening)  # noqa: E731
    played = play_once(factory, says(["a]"]), max_context_tokens=60)
    assert played.reasons == ["terminated"]
    assert played.only.prompt_ids.count(len(tokenizer) - 1) == 40
    assert played.only.prompt[0]["content"] == "q" + opening
    played = play_once(factory, says(["a]"]), max_context_tokens=40)
    assert played.reasons == ["env_error"]
    assert "has at least" not in played.record.errors[0]
