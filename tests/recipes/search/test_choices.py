"""The letter that a text chooses: what is read, and what is too ambiguous to be."""

import random

import pytest

from trl_stppo.recipes.search.choices import letter_match, letter_of

CHOICES = {"A": "E. coli", "B": "Vitamin C deficiency", "C": "Nitrofurantoin", "D": "The spleen"}
TEXTS = list(CHOICES.values())


@pytest.mark.parametrize("text", [
    "B", "b", " (B) ", "[b]", "B.", "B)", "**B**", "$B$", r"\boxed{B}", r"\boxed{\text{B}}",
    "B) text", "(B) text", "B: text", "**B.** Because of this.", "answer: B", "Answer: **B**",
    "**Answer:** B", "answer: b", "The answer is (B)", "The correct answer is B.",
    "The correct option is: B", "the answer is B because of the dose", "B. No other drug works.",
    "The answer is B, which is not wrong", "The answer is B. Not because of the dose.",
    r"The answer is \boxed{B}", "option B", "I would take (B), I think",
    "The answer is B.\nThis is sure.", "Let me see.\nB) text",
])  # fmt: skip
def test_reads_a_letter(text: str) -> None:
    assert letter_of(text) == "B"
    assert letter_of(text, ["one", "two", "three"]) == "B"


@pytest.mark.parametrize(("text", "letter"), [
    ("E. coli", "A"),  # no letter E
    ("The answer is nitrofurantoin.", "C"),
    ("spleen", "D"),
    ("B) Vitamin C deficiency", "B"),  # the C in it chooses nothing
    ("B - vitamin C deficiency", "B"),
    ("B Vitamin C deficiency", "B"),
    ("The answer is B) Vitamin C deficiency", "B"),
    ("C. nitrofurantoin, as it is safe", "C"),
])  # fmt: skip
def test_reads_the_text_of_a_choice(text: str, letter: str) -> None:
    assert letter_of(text, CHOICES) == letter
    assert letter_of(text, TEXTS) == letter


@pytest.mark.parametrize("text", [
    "", "  ", "no idea", "A or B", "A, B", "B/C", "A) or B)", "Answer: A or B", "(A) and (B)",
    "A) this\nB) that", "The answer is (A). The answer is (B).", "The answer is not (B)",
    "It isn't (B)", "It is (A), not (B)", "A cat", "The answer is a cat", "Answer: I think so",
    "Z", "F", "Banana", "B) Nitrofurantoin", "The answer is B: Nitrofurantoin", "Vitamin C",
    "(A) is wrong, so (B)", "A) is incorrect", "(A) is not correct; (B) is", "A: wrong",
    "A) No, B", "(A)? No.", "I think (A) can't be", "(A) is clearly ruled out",
    "The answer is A? No.", "\u212a", "x" * 5_000 + " (B)",
])  # fmt: skip
def test_ambiguous_is_none(text: str) -> None:
    assert letter_of(text, CHOICES) is None


@pytest.mark.parametrize("reason", ["because it works", "since it helps", "as it is safe"])
def test_a_reason_tells_the_letter_from_the_article(reason: str) -> None:
    for choices in (None, CHOICES):
        assert letter_of(f"The answer is A {reason}", choices) == "A"
        assert letter_of(f"Answer: a {reason}", choices) == "A"


ANSWERS, BLOOD = ["yes", "no", "maybe"], {"A": "B", "B": "AB", "C": "A", "D": "0"}


@pytest.mark.parametrize(("text", "choices", "letter"), [
    ("B) no", ANSWERS, "B"),  # what reads as a denial may be the text of the choice
    ("I take (B) no.", ANSWERS, "B"),
    ("A) Not indicated, as it harms", ["Not indicated", "Once"], "A"),
    ("A) no", ANSWERS, None),  # the label of one, the text of another
    ("A. fumigatus", ["C. albicans", "A. fumigatus"], "B"),
    ("E. coli infection", ["v", "w", "x", "y", "z"], None),  # a name is no label
    ("e. coli", {"A": "one", "E": "E. coli"}, "E"),
    ("A", BLOOD, "A"),  # a bare letter wins over a choice of that text
    ("AB", BLOOD, "B"),
    ("same", ["same", "Same!"], None),
    ("A", ["same", "Same!"], "A"),
    ("E", {"A": "x", "B": "y", "E": None}, None),  # as a data set fills its columns up
    ("none", {"A": "x", "B": "None", "E": None}, "B"),
])  # fmt: skip
def test_letters_and_texts_in_conflict(text: str, choices, letter: str | None) -> None:
    assert letter_of(text, choices) == letter


def test_match_against_letters_and_texts() -> None:
    assert letter_match("The answer is (B)", ["B"])
    assert letter_match("b", ["A", "B"])
    assert letter_match("B", "B")
    assert letter_match("Nitrofurantoin", ["C"], CHOICES)
    assert letter_match("C", ["nitrofurantoin"], TEXTS)
    assert not letter_match("A", ["B"])
    assert not letter_match("A or B", ["B"])
    assert not letter_match("B", [])
    assert not letter_match(None, ["B"])


def test_never_raises() -> None:
    rng = random.Random(0)
    pieces = [*"ABCab ()[]{}.:,*\n", "answer", " is ", "not ", "\\boxed{", "or", "\ud800", "\u0130"]
    odd = [None, 3, b"B", ["B"], {}]
    kinds = [None, CHOICES, TEXTS, [], {}, [None, 1], {"": "x", 4: None, "ab": "y"}, 7, "AB"]
    for _ in range(4000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        choices = rng.choice(kinds)
        assert letter_of(text, choices) in {None, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
        letter_match(rng.choice([text, *odd]), ["A", text], choices)
