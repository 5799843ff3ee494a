"""Environments of all forms: what reaches them, what they may return, which instance plays which row."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import time

import pytest

from tests.kit.episodes import Echoing, ScriptedEnv, done, going
from tests.kit.rollout_kit import build, play, play_once, says, shown
from trl_stppo import isolated
from trl_stppo.rollout.record import StopReason


def scripted(*steps, **options):
    return lambda: ScriptedEnv(*steps, **options)


class AsyncReset(ScriptedEnv):
    async def reset(self, **row):
        await asyncio.sleep(0.001)
        return super().reset(**row)


class AsyncStep(ScriptedEnv):
    async def step(self, action):
        await asyncio.sleep(0.001)
        return super().step(action)


class AsyncBoth(AsyncReset, AsyncStep):
    pass


class Drawn(ScriptedEnv):
    """Draws the number of its steps; the second picture fails, the third is no text."""

    drawn = 0

    def reset(self, **row):
        self.drawn = 0
        return super().reset(**row)

    def render(self):
        self.drawn += 1
        if self.drawn == 2:
            raise OSError("no screen")
        return f"step {self.drawn - 1}" if self.drawn != 3 else 7


class AsyncDrawn(AsyncBoth, Drawn):
    pass


class Tools(Echoing):
    """A tool environment that counts how often it was reset."""

    resets = 0

    def reset(self, **row):
        self.row, self.resets = row, self.resets + 1
        return f" {self.resets}"


class AsyncTools(Tools):
    async def reset(self, **row):
        await asyncio.sleep(0.001)
        return super().reset(**row)


@pytest.mark.long
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("kind", [Drawn, AsyncDrawn])
def test_pictures_of_the_environment_are_kept_and_their_errors_end_nothing(kind, isolate):
    steps = [going("x"), going("y"), done(1.0)]
    factory = functools.partial(kind, *steps)
    if isolate:
        factory = isolated(factory)
    played = play_once(factory, says(["a]", "b]", "c]"]))
    (episode,) = played.episodes
    name = kind.__name__
    error = f"{name}.render raised OSError('no screen')"
    assert episode.pictures == ["step 0", error, None, "step 3"]
    assert episode.stop_reason == StopReason.TERMINATED


@pytest.mark.parametrize("kind", [ScriptedEnv, AsyncReset, AsyncStep, AsyncBoth])
def test_methods_may_be_asynchronous_or_not(kind):
    engine = build(lambda: kind(going("x", 0.5), done(1.0), opening=("hi", {})))
    for _ in range(2):
        rows = [{"n": 1}, {"n": 2}]
        played = play(engine, says(["a]", "b]"], ["c]", "d]"]), rows)
        assert [shown(e) for e in played.episodes] == [
            "[u qhi][a |a][u x][a b]",
            "[u qhi][a |c][u x][a d]",
        ]
        assert played.record.turn_rewards == [[0.5, 1.0]] * 2
        assert [e.env.rows[-1] for e in played.episodes] == rows
        assert [e.env.actions for e in played.episodes] == [["a", "b"], ["c", "d"]]
        assert played.record.errors == [None, None]


@pytest.mark.parametrize(("step", "reason", "success"), [
    (("x", 1.0, True, False, {}), StopReason.TERMINATED, None),
    (("x", 1.0, False, True, {}), StopReason.TRUNCATED, None),
    (("x", 1.0, False, False, {}), StopReason.MAX_TURNS, None),
    (("x", 1, 1, 0, {"success": 1}), StopReason.TERMINATED, True),
    (("x", True, True, False, {"success": False}), StopReason.TERMINATED, False),
])  # fmt: skip
def test_a_step_returns_five_things(step, reason, success):
    played = play_once(scripted(step), says(["a]"]), max_turns=1)
    assert played.reasons == [reason]
    assert played.record.turn_rewards == [[1.0]]
    assert played.record.success == [success]
    assert isinstance(played.record.turn_rewards[0][0], float)


@pytest.mark.parametrize(("kind", "result", "message"), [
    (ScriptedEnv, "done", "ScriptedEnv.step returned str: 'done'"),
    (AsyncStep, ("x", 1.0, True), "AsyncStep.step returned a tuple of 3: "),
    (ScriptedEnv, ("x", 1.0, True, False, {}, 1), ".step returned"),
    (ScriptedEnv, ["x", 1.0, True, False, {}], ".step returned list: ['x'"),
    (ScriptedEnv, None, ".step returned NoneType"),
    (ScriptedEnv, (b"x", 1.0, False, False, {}), "returned the observation b'x'"),
    (AsyncStep, ("x", 1.0, False, {}), "AsyncStep.step returned a tuple of 4: "),
    (AsyncStep, ("x", 1.0, False, False, None), "returned the info None"),
    (ScriptedEnv, ("x", math.nan, False, False, {}), ".step returned the reward nan"),
    (AsyncStep, ("x", "1", False, False, {}), ".step returned the reward '1'"),
])  # fmt: skip
def test_what_a_step_must_not_return_ends_only_that_episode(kind, result, message):
    engine = build({"bad": lambda: kind(going("x", 2.0), result), "good": scripted(done(1.0))})
    rows = [{"environment": "bad"}, {"environment": "good"}]
    played = play(engine, says(["a]", "b]"], ["c]"]), rows)
    assert played.reasons == ["env_error", "terminated"]
    error = played.record.errors[0]
    assert error.startswith(("EnvironmentContractError: ", "ValueError: "))
    assert message in error
    assert played.record.turn_rewards == [[2.0, 0.0], [1.0]]
    assert played.record.trains == [False, True]


@pytest.mark.parametrize(
    ("kind", "opening"),
    [(ScriptedEnv, 3), (AsyncReset, ["hi"]), (ScriptedEnv, ("hi", {}, 1)), (AsyncReset, (3, {}))],
)
def test_what_reset_must_not_return(kind, opening):
    played = play_once(lambda: kind(done(), opening=opening), says([]))
    assert played.reasons == ["env_error"]
    assert ".reset returned" in played.record.errors[0]
    # An episode without any turn still has a prompt, and one token that nobody has said.
    assert shown(played.only) == "[u q][a |]"
    assert (played.only.action_mask, played.record.turn_spans) == ([False], [[]])
    assert played.record.turn_rewards == [[]]


@pytest.mark.parametrize("opening", ["hi", ("hi", {}), ("hi", None), None, "", (None, {})])
def test_opening_words_join_the_last_message(opening):
    played = play_once(scripted(done(), opening=opening), says(["a]"]))
    assert shown(played.only) == ("[u qhi][a |a]" if "hi" in str(opening) else "[u q][a |a]")


def test_a_tool_environment_may_open_with_text_blocks():
    class Blocks(Tools):
        def reset(self, opening, **row):
            return opening

    engine = build(Blocks)
    blocks = [{"type": "text", "text": "hi"}]
    rows = [{"opening": o} for o in (blocks, None, "", 3, [{"type": "image"}])]
    played = play(engine, lambda row, turn: "a]", rows)
    assert played.reasons == ["no_action"] * 3 + ["env_error"] * 2
    assert played.episodes[0].prompt[0]["content"] == "qhi"
    assert "Blocks.reset returned 3; allowed: a str" in played.record.errors[3]
    assert "Blocks.reset returned an image" in played.record.errors[4]


def test_reset_gets_the_columns_that_it_names():
    seen = []

    class Named(ScriptedEnv):
        def reset(self, letter, other="none"):
            seen.append((letter, other))
            return ""

    engine = build(lambda: Named(done()))
    prompt = [{"role": "user", "content": "q"}]
    play(engine, says(["a]"]), [{"prompt": prompt, "letter": "b", "answer": 42}])
    play(engine, says(["a]"]), [{"letter": "c", "other": "x", "seed": 3}])
    assert seen == [("b", "none"), ("c", "x")]
    assert play(engine, says([]), [{"answer": 42}]).reasons == ["env_error"]


def seeds_of(engine, seed=(0,), first_row=0, rows=4, columns=None):
    given = columns or [{} for _ in range(rows)]
    played = play(engine, lambda row, turn: "a]", given, seed=seed, first_row=first_row)
    return [episode.env.seed for episode in played.episodes]


def test_a_seed_is_given_to_who_asks_and_depends_on_rollout_and_row_only():
    class Seeded(ScriptedEnv):
        def reset(self, seed, **row):
            assert not row
            self.seed = seed

    class SeededOnly(ScriptedEnv):
        def reset(self, seed=None):
            self.seed = seed

    for kind in (Seeded, SeededOnly):
        engine = build(lambda kind=kind: kind(done()))
        first = seeds_of(engine, (5, 1))
        assert seeds_of(engine, (5, 1)) == first
        assert seeds_of(engine, (5, 1), first_row=2, rows=2) == first[2:]
        others = [*seeds_of(engine, (5, 2)), *seeds_of(engine, (6, 1)), *seeds_of(engine, (1, 5))]
        assert len({*first, *others}) == 16
        assert all(type(s) is int and 0 <= s < 2**31 for s in (*first, *others))
        assert seeds_of(engine, columns=[{"seed": 7}]) == [7]


def test_both_kinds_play_in_one_batch_and_the_column_that_chose_is_not_passed_on():
    kinds = {"text": scripted(going("x"), done(2.0)), "tools": Tools, "more": AsyncTools}
    engine = build(kinds)
    names = ["tools", "text", "more", "text", "tools"]
    rows = [{"environment": name, "n": i} for i, name in enumerate(names)]
    script = {"text": ["a]", "b]"], "tools": ["!e y]", "c]"], "more": ["d]"]}
    played = play(engine, lambda row, turn: script[names[row]][turn], rows)
    tools, text = "[u q 1][a |!e y][t y][a c]", "[u q][a |a][u x][a b]"
    assert [shown(e) for e in played.episodes] == [tools, text, "[u q 1][a |d]", text, tools]
    assert played.record.env_types == ["Tools", "ScriptedEnv", "AsyncTools", "ScriptedEnv", "Tools"]
    assert played.record.turn_rewards == [[0, 0], [0, 2.0], [0], [0, 2.0], [0, 0]]
    assert played.record.has_turn_rewards == [False, True, False, True, False]
    assert [e.columns for e in played.episodes] == [{"n": i} for i in range(5)]
    assert [played.episodes[i].env.row["n"] for i in (0, 2, 4)] == [0, 2, 4]
    assert len({id(e.env) for e in played.episodes}) == 5


def test_a_single_environment_sees_an_environment_column_as_data():
    engine = build(scripted(done()))
    played = play(engine, says(["a]"]), [{"environment": "north"}])
    assert played.only.env.rows == [{"environment": "north"}]


@pytest.mark.parametrize("row", [{"environment": "unknown"}, {"environment": None}, {}])
def test_a_row_that_names_no_known_environment_is_refused(row):
    engine = build({"a": scripted(done()), "b": Tools})
    with pytest.raises(ValueError, match=r"`environment=.*allowed are \['a', 'b'\]"):
        play(engine, says([]), [{"environment": "a"}, row])


def test_tools_need_a_conversation():
    with pytest.raises(ValueError, match="`prompt` is a string"):
        play_once(Tools, says([]), prompts=["go"])
    kinds = {"text": scripted(done()), "tools": Tools}
    engine = build(kinds)
    assert play(engine, says(["a"]), [{"environment": "text"}], ["go"]).reasons == ["terminated"]


def test_the_nth_episode_of_a_name_gets_the_nth_instance_whatever_the_timing():
    made = {"a": [], "b": []}

    def factory(name):
        def make():
            time.sleep(random.random() * 0.02)
            made[name].append(Slow(going("x"), done()))
            return made[name][-1]

        return make

    class Slow(ScriptedEnv):
        def reset(self, **row):
            time.sleep(random.random() * 0.02)
            self.played = [*getattr(self, "played", []), row["n"]]
            return super().reset(**row)

    engine = build({"a": factory("a"), "b": factory("b")})
    assert len(made["a"]) == len(made["b"]) == 1
    before = {}
    for batch in range(3):
        rows = [{"environment": "ab"[n % 3 == 0], "n": n} for n in range(9)]
        random.Random(batch).shuffle(rows)
        play(engine, lambda row, turn: "a]", rows)
        for name in "ab":
            numbers = [row["n"] for row in rows if row["environment"] == name]
            of = {env.played[-1]: env for env in made[name]}
            instances = [of[n] for n in numbers]
            assert len({id(env) for env in instances}) == len(numbers)
            assert before.setdefault(name, instances) == instances
    assert {name: len(envs) for name, envs in made.items()} == {"a": 6, "b": 3}
    assert all(len(env.played) == 3 for envs in made.values() for env in envs)


def test_actions_are_shown_without_markers_and_info_is_recorded():
    steps = [going("", valid_action=True), going("", valid_action=False), done(success=True)]
    played = play_once(scripted(*steps), says(["ab]", "c]", "d]"]))
    assert played.only.env.actions == ["ab", "c", "d"]
    assert played.record.valid_actions == [[True, False]]
    assert played.record.success == [True]


def test_time_in_environments_and_in_generation_is_measured():
    class Slow(ScriptedEnv):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    started = time.perf_counter()
    record = play_once(lambda: Slow(going("x"), done()), says(["a]", "b]"])).record
    took = time.perf_counter() - started
    assert 0.1 <= record.env_seconds < took
    assert 0.09 <= record.wait_seconds < took
    assert 0.0 < record.generation_seconds < took - 0.1
