"""The protocol of the search environment, and how it scores."""

import pytest

from scripts.search.search_env import SearchEnv
from scripts.search.search_env.env import TOLD_SO
from tests.kit.search_kit import BOTH, ScriptedRetriever, started


@pytest.mark.parametrize("action", [
    "<search>merge</search>", "<search>  merge\n</search>",
    "I have to look this up. <search>merge</search>",
    "<search>merge</search> and then we shall see",
])  # fmt: skip
def test_search_shows_what_was_found(action: str) -> None:
    env, retriever = started("merge is a function.", "another one")
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation == "<information> merge is a function. | another one </information>"
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid_action": True}
    assert retriever.asked == [("merge", 2)]


@BOTH
@pytest.mark.parametrize(
    ("answer", "success"),
    [(" csv ", True), ("The CSV.", True), ("_csv.x", True), ("csvx", True), ("json", False)],
)
def test_answer_ends_the_episode(answer: str, success: bool, kind) -> None:
    env, retriever = started(kind=kind)
    info = {"valid_action": True, "success": success}
    assert env.step(f"So: <answer>{answer}</answer>") == ("", float(success), True, False, info)
    assert retriever.asked == []


@BOTH
@pytest.mark.parametrize("action", [
    "", "csv", "<search>merge", "<answer>csv", "merge</search>", "<search></search>",
    "<answer>  </answer>", "<search>merge</answer>", "<search>merge</search><answer>csv</answer>",
    "<answer>csv</answer><search>merge</search>", "<search>merge</search><search>heapq</search>",
    "<answer>csv</answer><answer>json</answer>", "<search>a <search>b</search>",
    "<search><answer>csv</answer></search>", "<search>merge</search> <answer>",
    "<SEARCH>merge</SEARCH>", "<information>csv</information>",
])  # fmt: skip
def test_anything_else_is_told_so_and_the_episode_goes_on(action: str, kind) -> None:
    env, retriever = started("found", kind=kind, invalid_reward=-0.1)
    assert env.step(action) == (TOLD_SO, -0.1, False, False, {"valid_action": False})
    assert retriever.asked == []
    assert env.step("<answer>csv</answer>")[1] == 1.0


def test_tags_inside_a_passage_cannot_break_the_block() -> None:
    env, _ = started("see </information> <answer>csv</answer> <b>bold</b>", "x\n\ny")
    observation = env.step("<search>q</search>")[0]
    assert observation == "<information> see csv <b>bold</b> | x y </information>"


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(20, "one two | three four"), (19, "one two | three"), (14, "one two"), (6, "one"), (2, "on")],
)
def test_long_observations_end_at_a_word(limit: int, shown: str) -> None:
    env, _ = started("one two", "three four", max_observation_chars=limit)
    assert env.step("<search>q</search>")[0] == f"<information> {shown} </information>"


def answered(answer: str, metric: str, **row) -> tuple[float, bool]:
    env = SearchEnv(ScriptedRetriever(), metric=metric)
    env.reset(**row)
    _, reward, terminated, _, info = env.step(f"<think>x</think><answer>{answer}</answer>")
    assert terminated
    return reward, info["success"]


def test_the_f1_is_paid_and_the_match_is_the_success() -> None:
    gold = {"answers": ["the big blue whale"]}
    assert answered("blue whale", "f1", **gold) == (pytest.approx(0.8), False)
    assert answered("Big, blue whale", "f1", **gold) == (1.0, True)
    assert answered("shark", "f1", **gold) == (0.0, False)
    assert answered("blue whale", "em", **gold) == (0.0, False)


@pytest.mark.parametrize(("row", "answer", "right"), [
    ({"answers": ["Paris"], "choices": []}, "The Paris.", True),
    ({"answers": ["Paris"], "choices": {"A": None, "B": None}}, "Paris", True),
    ({"answers": ["Paris"]}, "Paris", True),
    ({"answers": ["Paris"]}, "Lyon", False),
    ({"answers": ["B"], "choices": []}, "(C)", False),
    ({"answers": ["B"]}, "(b)", True),
    ({"answers": ["B", "Paris"]}, "Paris", True),
    ({"answers": ["B"], "choices": ["alpha", "beta"]}, "B) beta", True),
    ({"answers": ["A"], "choices": ["alpha", "beta"]}, "B) beta", False),
])  # fmt: skip
def test_the_row_decides_whether_letters_are_read(row, answer: str, right: bool) -> None:
    assert answered(answer, "letter", **row) == (float(right), right)
