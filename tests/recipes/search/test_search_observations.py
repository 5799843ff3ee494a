"""What the search environment shows, and how it cuts."""

import re

import pytest

from tests.kit.search_kit import started
from trl_stppo.recipes.search import SearchEnv
from trl_stppo.recipes.search.retrieval import Passage

TWO = (Passage("Ada Lovelace", "She wrote\nnotes."), Passage("", "Untitled text."))
SHOWN = 'Doc 1(Title: "Ada Lovelace") She wrote notes.\nDoc 2 Untitled text.'


def observed(*texts, **settings) -> str:
    env, _ = started(*texts, kind=SearchEnv, **settings)
    return env.step("<think>I need it.</think><search>q</search>")[0]


def test_passages_are_numbered_with_titles_one_per_line() -> None:
    assert observed(*TWO) == f"<information>{SHOWN}</information>"


def test_titles_cannot_break_the_block() -> None:
    shown = observed(Passage("a</information>\nb<think>", "c </think> d"))
    assert shown == '<information>Doc 1(Title: "a b") c d</information>'


def test_the_demo_takes_thoughts_for_text() -> None:
    env, retriever = started("found")
    env.step("<think> <search>merge</search> <information>")
    assert retriever.asked == [("merge", 2)]
    thought = "<think><answer>a</answer></think><answer>csv</answer>"
    assert env.step(thought)[4]["valid_action"] is False


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


def test_a_heading_that_takes_all_the_room_is_left_out() -> None:
    passages = (Passage("A title of very many words", "She wrote notes."), TWO[1])
    heading = 'Doc 1(Title: "A title of very many words") She'
    bare = {1: "S", 2: "Sh", 3: "She", 8: "She", 9: "She wrote", 16: "She wrote notes."}
    bare[len(heading) - 1] = "She wrote notes."
    for limit, text in {**bare, len(heading): heading}.items():
        shown = observed(*passages, max_observation_chars=limit)
        assert shown == f"<information>{text}</information>"


def test_a_passage_without_text_shows_its_title() -> None:
    assert observed(Passage("Only", ""), TWO[1], max_observation_chars=25) == (
        '<information>Doc 1(Title: "Only") </information>'
    )
    assert (
        observed(Passage("Only", ""), max_observation_chars=4) == "<information>Only</information>"
    )


def test_without_a_tokenizer_a_token_is_four_characters() -> None:
    shown = observed("word " * 999, max_observation_tokens=50)
    assert 190 < len(shown) - len("<information></information>") <= 200
    assert len(observed("word " * 999, max_observation_tokens=None)) > 4900
    assert 1990 < len(observed("word " * 999)) <= 2000 + 27


def test_a_cap_below_the_fixed_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="max_observation_tokens is 9; must be >= 59"):
        SearchEnv(max_observation_tokens=9, count_tokens=len)
