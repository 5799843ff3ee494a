import random
from collections import Counter
from pathlib import Path

import pytest

from tests.script_kit import scripts
from trl_stppo.recipes.search.env import NOTHING_FOUND, TOLD_SO, StdlibSearchEnv
from trl_stppo.recipes.search.stdlib_docs import questions

with scripts() as _module:
    maker = _module("stdlib_questions")
QUESTIONS, is_held_out = maker.QUESTIONS, maker.is_held_out

pytest.importorskip("bm25s")


@pytest.fixture
def demos(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts" / "makers"))
    import search_demonstrations

    return search_demonstrations


def test_same_seed_same_rows(demos) -> None:
    first = demos.conversations(50, demos.Mixture(), seed=3)
    assert demos.conversations(50, demos.Mixture(), seed=3) == first
    assert demos.conversations(50, demos.Mixture(), seed=4) != first
    assert demos.drills(5, seed=3) == demos.drills(5, seed=3)


def test_roles_alternate_and_the_model_speaks_last(demos) -> None:
    for row in demos.conversations(200, demos.Mixture(), seed=0):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 2 <= len(roles) <= 8


def test_right_behaviour_always_succeeds(demos) -> None:
    rng = random.Random(0)
    source = demos.TaskSource(rng, 0.5)
    for _ in range(300):
        task = source.draw()
        messages = demos.demonstrate(task, demos.EXPERT, rng)
        assert len(messages) == 2 * (len(task.path) + 1)
        env = StdlibSearchEnv(task.retriever)
        env.reset(answers=[task.answer])
        outcomes = [env.step(m["content"]) for m in messages if m["role"] == "assistant"]
        assert outcomes[-1][1] == 1.0
        # Copying suffices: every name that is said has been shown before.
        for position, action in enumerate(messages[1::2]):
            name = action["content"].split("> ")[1].split("</")[0]
            shown = [message["content"] for message in messages[: 2 * position + 1 : 2]]
            assert any(f" {name}" in text for text in shown)


def test_mixture_holds_every_behaviour(demos) -> None:
    rows = demos.conversations(1500, demos.Mixture(), seed=1)
    firsts = Counter()
    observations = set()
    for row in rows:
        question, first = (message["content"] for message in row["messages"][:2])
        name = first.partition("> ")[2].partition("</")[0]
        if not first.startswith("<"):
            firsts["malformed"] += 1
        elif first.startswith("<answer>"):
            firsts["give_up"] += 1
        else:
            firsts["search" if name in question.rstrip("?").split() else "generic"] += 1
        observations |= {message["content"] for message in row["messages"][2::2]}
    odds = demos.Mixture().blind
    for behaviour, weight in odds.items():
        if behaviour in ("malformed", "give_up"):
            assert abs(firsts[behaviour] / len(rows) - weight / sum(odds.values())) < 0.05
    assert {TOLD_SO, NOTHING_FOUND} <= observations


def test_giving_up_names_nothing_and_ends_the_episode(demos) -> None:
    rng = random.Random(0)
    source = demos.TaskSource(rng, 0.5)
    gives_up = demos.Mixture({"search": 1}, {"give_up": 1}, {"give_up": 1})
    for _ in range(100):
        task = source.draw()
        messages = demos.demonstrate(task, gives_up, rng)
        assert len(messages) == 4
        assert messages[-1]["content"] == f"<answer> {demos.GIVE_UP}</answer>"


def test_every_kind_of_question_is_drawn(demos) -> None:
    source = demos.TaskSource(random.Random(0), 0.0)
    asked = [source.draw().question for _ in range(200)]
    for template in QUESTIONS.values():
        assert any(question.startswith(template.partition("{")[0]) for question in asked)


def test_held_out_names_are_not_asked(demos) -> None:
    held_out = {row["prompt"][0]["content"] for row in questions("test")}
    source = demos.TaskSource(random.Random(0), 1.0)
    assert not held_out & {source.draw().question for _ in range(500)}
    assert not any(is_held_out(row["name"]) for row in questions("train"))


def test_made_up_names_look_like_identifiers(demos) -> None:
    source = demos.TaskSource(random.Random(0), 0.0)
    for style in ("snake", "camel", "dotted"):
        for _ in range(200):
            name = source.name(style)
            assert 0 < len(name) <= 24
            assert " " not in name


def test_drills_repeat_the_user(demos) -> None:
    for row in demos.drills(20, seed=0):
        user, assistant = row["messages"]
        assert user["content"] == assistant["content"]
        assert len(user["content"].split()) == 4
