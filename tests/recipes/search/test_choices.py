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


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("E. coli", "A"),  # no letter E
        ("The answer is nitrofurantoin.", "C"),
        ("spleen", "D"),
        ("B) Vitamin C deficiency", "B"),  # the C in it chooses nothing
        ("B - vitamin C deficiency", "B"),
        ("B Vitamin C deficiency", "B"),
        ("The answer is B) Vitamin C deficiency", "B"),
        ("C. nitrofurantoin, as it is safe", "C"),
    ],
)
def test_reads_the_text_of_a_choice(text: str, letter: str) -> None:
    assert letter_of(text, CHOICES) == letter
    assert letter_of(text, TEXTS) == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "no idea",
        "A or B",
        "A, B",
        "B/C",
        "A) or B)",
        "Answer: A or B",
        "(A) and (B)",
        "A) this\nB) that",
        "The answer is (A). The answer is (B).",
        "The answer is not (B)",
        "It isn't (B)",
        "It is (A), not (B)",
        "A cat",
        "The answer is a cat",
        "Answer: I think so",
        "Z",
        "F",
        "Banana",
        "B) Nitrofurantoin",  # the text of C
        "The answer is B: Nitrofurantoin",
        "Vitamin C",
        "(A) is wrong, so (B)",
        "A) is incorrect",
        "(A) is not correct; (B) is",
        "A: wrong",
        "A) No, B",
        "(A)? No.",
        "I think (A) can't be",
        "(A) is clearly ruled out",
        "The answer is A? No.",
        "\u212a",  # the Kelvin sign, whose small letter is k
        "x" * 5_000 + " (B)",
    ],
)
def test_ambiguous_is_none(text: str) -> None:
    assert letter_of(text, CHOICES) is None


@pytest.mark.parametrize("reason", ["because it works", "since it helps", "as it is safe"])
def test_a_reason_tells_the_letter_from_the_article(reason: str) -> None:
    for choices in (None, CHOICES):
        assert letter_of(f"The answer is A {reason}", choices) == "A"
        assert letter_of(f"Answer: a {reason}", choices) == "A"


def test_choices_that_deny() -> None:
    """What reads as a denial may be the text of the choice."""
    assert letter_of("B) no", ["yes", "no", "maybe"]) == "B"
    assert letter_of("I take (B) no.", ["yes", "no", "maybe"]) == "B"
    assert letter_of("A) Not indicated, as it harms", ["Not indicated", "Once"]) == "A"
    assert (
        letter_of("A) no", ["yes", "no", "maybe"]) is None
    )  # the label of one, the text of another
    assert letter_of("A. fumigatus", ["C. albicans", "A. fumigatus"]) == "B"


def test_a_name_is_no_label() -> None:
    assert letter_of("E. coli infection", ["v", "w", "x", "y", "z"]) is None
    assert letter_of("e. coli", {"A": "one", "E": "E. coli"}) == "E"


def test_a_bare_letter_wins_over_a_choice_of_that_text() -> None:
    blood = {"A": "B", "B": "AB", "C": "A", "D": "0"}
    assert letter_of("A", blood) == "A"
    assert letter_of("AB", blood) == "B"


def test_equal_choices_are_ambiguous_by_text() -> None:
    assert letter_of("same", ["same", "Same!"]) is None
    assert letter_of("A", ["same", "Same!"]) == "A"


def test_missing_choices_are_none() -> None:
    """A data set fills a column of dictionaries up with None."""
    assert letter_of("E", {"A": "x", "B": "y", "E": None}) is None
    assert letter_of("none", {"A": "x", "B": "None", "E": None}) == "B"


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
