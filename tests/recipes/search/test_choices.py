"""The letter that an answer consists of."""

import pytest

from scripts.search.search_env.rewards import letter_of

CHOICES = {"A": "E. coli", "B": "Vitamin C deficiency", "C": "Nitrofurantoin", "D": "The spleen"}
TEXTS = list(CHOICES.values())


@pytest.mark.parametrize("text", ["B", "b", " (B) ", "[b]", "B.", "B)", "**B**", "$B$", "_B_:\n"])
def test_reads_a_letter(text: str) -> None:
    for choices in (None, CHOICES, TEXTS):
        assert letter_of(text, choices) == "B"


@pytest.mark.parametrize(
    "text", ["B) Vitamin C deficiency", "(b) vitamin C deficiency.", "B: Vitamin C deficiency"]
)
def test_reads_a_letter_with_the_text_of_its_choice(text: str) -> None:
    assert letter_of(text, CHOICES) == letter_of(text, TEXTS) == "B"
    assert letter_of(text) is None


@pytest.mark.parametrize("text", [
    "", "  ", "no idea", "A or B", "A, B", "B/C", "A) this\nB) that", "not (B)", "A cat", "Z", "F",
    "Banana", "B) Nitrofurantoin", "Vitamin C deficiency", "E. coli", "(A) is wrong, so (B)",
    "The answer is B", "A+", "\u212a", "B" + " x" * 5_000,
])  # fmt: skip
def test_anything_else_chooses_nothing(text: str) -> None:
    assert letter_of(text, CHOICES) is None
