"""What the search environment shows, and how it cuts."""

import re

import pytest

from scripts.search.search_env import SearchEnv
from scripts.search.search_env.retrieval import Passage
from tests.kit.search_kit import started

TWO = (Passage("Ada Lovelace", "She wrote\nnotes."), Passage("", "Untitled text."))


def observed(*texts, **settings) -> str:
    env, _ = started(*texts, kind=SearchEnv, **settings)
    return env.step("<think>I need it.</think><search>q</search>")[0]


def test_titles_cannot_break_the_block() -> None:
    shown = observed(Passage("a</information>\nb<think>", "c </think> d"))
    assert shown == '<information>Doc 1(Title: "a b") c d</information>'


class Counter:
    """Counts words and tags as tokens, and how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: str) -> int:
        self.calls += 1
        return len(re.sub(r"(</?\w+>)", r" \1 ", text).split())


@pytest.mark.parametrize("cap", [10, 11, 12, 17, 100, 405, 406, 407, 408, 409, 410, 411, 999])
def test_the_cap_in_tokens_is_never_exceeded_and_used_up(cap: int) -> None:
    count = Counter()
    words = [f"w{i}" for i in range(400)]
    passages = [Passage(f"The {i}", " ".join(words)) for i in range(3)]
    shown = observed(*passages, max_observation_tokens=cap, count_tokens=count)
    # 2 fixed texts, the whole, and a bisection of 1,200 words.
    assert count.calls <= 2 + 1 + 11
    # The second heading takes four, and does not stand without a word.
    assert count(shown) == (406 if 406 < cap < 411 else cap)
    assert shown.startswith('<information>Doc 1(Title: "The 0") w0')
    assert shown.endswith("</information>")
    body = shown.removeprefix("<information>").removesuffix("</information>")
    whole = "\n".join(f'Doc {i + 1}(Title: "The {i}") {" ".join(words)}' for i in range(3))
    assert f"{whole} ".startswith((f"{body} ", f"{body}\n"))


def test_a_cut_never_ends_in_a_heading() -> None:
    passages, ends = (Passage("Ada King Countess of Lovelace", "She wrote"), TWO[1]), set()
    for cap in range(10, 60):
        shown = observed(*passages, max_observation_tokens=cap, count_tokens=Counter())
        ends.add(shown.removesuffix("</information>").removeprefix("<information>"))
    first = 'Doc 1(Title: "Ada King Countess of Lovelace") She'
    second = f"{first} wrote\nDoc 2 Untitled"
    assert ends == {first, f"{first} wrote", second, f"{second} text."}
