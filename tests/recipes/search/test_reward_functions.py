"""Reward functions: what the policy said, what counts as its answer, and what each one pays."""

from __future__ import annotations

import random

import pytest

from scripts.search.search_env.rewards import (
    exact_match_reward,
    f1_reward,
    final_answer,
    format_reward,
    multiple_choice_reward,
)


def said(*turns: str | None) -> list[dict[str, str | None]]:
    """A conversation in which an observation with an answer of its own follows every turn."""
    noise = {"role": "user", "content": "<information> <answer>noise</answer> </information>"}
    return [m for t in turns for m in ({"role": "assistant", "content": t}, noise)]


@pytest.mark.parametrize(("text", "answer"), [
    ("<answer> Paris </answer>", "Paris"),
    ("<answer>\nParis\n</answer> and more", "Paris"),
    ("Paris", None),
    ("", None),
    ("<answer>one", None),
    ("one</answer>", None),
    ("<think><answer>one</answer></think> <answer>two</answer>", "two"),
    ("<answer>two</answer> <think><answer>one</answer></think>", "two"),
    ("<think><answer>one</answer>", None),
    ("so <answer>one</answer>? No. </think> <answer>two</answer>", "two"),
    ("<answer>one</answer> </think>", None),
    ("<answer>one <think> two </think></answer>", None),
    ("<information> <answer>one</answer> </information>", None),
    ("<ANSWER>one</ANSWER>", None),
])  # fmt: skip
def test_the_last_complete_answer_outside_of_thoughts_and_observations(text, answer):
    assert final_answer(text) == answer
    assert final_answer(said(text)) == answer
    assert final_answer(said("<answer>old</answer>", text)) == ("old" if answer is None else answer)


ROWS = [
    ("The   PARIS!", ["Paris"], 1.0, 1.0),
    ("Cafe\u0301", ["caf\u00e9"], 1.0, 1.0),
    ("Lyon", ["Paris", "Lyon"], 1.0, 1.0),
    ("Paris, France", ["Paris", "Lyon"], 0.0, 2 / 3),
    ("", ["Paris"], 0.0, 0.0),
    ("Paris", "Paris", 1.0, 1.0),
    ("1997", [1997], 1.0, 1.0),
    ("Paris", None, None, None),
    ("Paris", [], None, None),
    ("Paris", "", None, None),
    ("Paris", [None, " "], None, None),
]


@pytest.mark.parametrize("wrap", [str, said], ids=["strings", "conversations"])
def test_exact_match_and_f1(wrap):
    completions = [wrap(f"<think>t</think><answer>{text}</answer>") for text, *_ in ROWS]
    answers = [row[1] for row in ROWS]
    assert exact_match_reward(completions, answers, prompts=[]) == [row[2] for row in ROWS]
    assert f1_reward(completions, answers=answers) == pytest.approx([row[3] for row in ROWS])


def test_multiple_choice():
    texts = ["aspirin", "ibuprofen"]
    answers = ["B", "(B)", "Ibuprofen", "A", "A or B", "B) aspirin", ""]
    completions = [f"<answer>{text}</answer>" for text in answers]
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert multiple_choice_reward(completions, [["B"]] * 7, [texts] * 7) == expected
    by_letter = {"A": "aspirin", "B": "ibuprofen", "C": None}
    assert multiple_choice_reward(completions, ["B"] * 7, choices=[by_letter] * 7) == expected
    assert multiple_choice_reward(completions[:2], [["B"]] * 2) == [1.0, 1.0]


def test_every_row_of_a_mixture_is_paid_by_one_function():
    """Open questions by exact match, those with choices by the letter."""
    completions, answers = ["<answer>B</answer>"] * 3, [["B"]] * 3
    for choices in ([["x", "y"], [], None], [{"A": "x", "B": "y"}, {"A": None, "B": None}, {}]):
        assert exact_match_reward(completions, answers, choices) == [None, 1.0, 1.0]
        assert f1_reward(completions, answers, choices) == [None, 1.0, 1.0]
        assert multiple_choice_reward(completions, answers, choices) == [1.0, None, None]


SEARCH = "<think>I look.</think>\n<search>capital</search>"
ANSWER = "<think>I know.</think> <answer>Paris</answer>\n"


@pytest.mark.parametrize(("turns", "share"), [
    ([ANSWER], 1.0),
    ([SEARCH, ANSWER], 1.0),
    ([SEARCH, SEARCH], 0.5),
    ([ANSWER, ANSWER], 0.5),
    ([SEARCH, "<answer>Paris</answer>"], 0.5),
    ([SEARCH, "<think></think><answer>Paris</answer>"], 0.5),
    ([SEARCH, "<think>t</think><answer> </answer>"], 0.5),
    ([SEARCH, SEARCH + ANSWER], 0.5),
    ([SEARCH, ANSWER + "And more."], 0.5),
    ([SEARCH, "So " + ANSWER], 0.5),
    ([SEARCH, "<think>t</think><answer>a <search>b</search></answer>"], 0.5),
    ([SEARCH, "<think>t<think>t</think><answer>a</answer>"], 0.5),
    ([SEARCH, "<think>t</think>" + ANSWER], 0.5),
    (["I look.</think><search>capital</search>", "I know.</think><answer>Paris</answer>"], 1.0),
    ([SEARCH, "</think><answer>Paris</answer>"], 0.5),
    ([SEARCH, "<think>t</think><answer>Paris</search>"], 0.5),
    ([None], 0.0),
    ([], 0.0),
])  # fmt: skip
def test_format(turns, share):
    assert format_reward([said(*turns)], answers=None) == [share]
    if None not in turns:
        text = "<information> <answer>noise</answer> </information>".join(turns)
        assert format_reward([text]) == [share]


def odd_value(rng: random.Random, depth: int = 0):
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "a", " the "]
    pieces += ["<information>", "</information>", "\ud800", "\0", "É", "<", ">", "(B)", "\n", "A"]
    kind = rng.randrange(10 if depth < 3 else 5)
    if kind < 3:
        return "".join(rng.choices(pieces, k=rng.randrange(14)))
    if kind < 5:
        return rng.choice([None, 0, 1.5, True, b"<answer>A</answer>", float("nan"), (), {}, set()])
    if kind < 7:
        role = rng.choice(["assistant", "assistant", "user", "tool", None, 3])
        return {"role": role, "content": odd_value(rng, depth + 1)}
    return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def test_nothing_makes_them_raise_or_leave_zero_to_one():
    rng = random.Random(0)
    functions = (exact_match_reward, f1_reward, multiple_choice_reward, format_reward)
    for _ in range(1500):
        completions = [odd_value(rng) for _ in range(3)]
        answers = rng.choice([[["A"], ["the"], "É"], None, odd_value(rng)])
        choices = rng.choice([None, [["a", "É"]] * 3, odd_value(rng)])
        for function in functions:
            paid = function(completions, answers=answers, choices=choices, prompts=None)
            assert len(paid) == 3
            assert all(reward is None or 0.0 <= reward <= 1.0 for reward in paid)
