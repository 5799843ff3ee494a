"""SQuAD's normalisation, exact match and F1, by hand and against a plain reading of the script."""

import random
import re
import string
import unicodedata

import pytest

from scripts.search.search_env.rewards import exact_match, f1_score, normalize_answer


@pytest.mark.parametrize(("text", "expected"), [
    ("a cat, an owl and the Dog.", "cat owl and dog"),
    ("  two \n\t words ", "two words"),
    ("theatre", "theatre"),
    ("A", ""),
    ("os.path __init__", "ospath init"),
    ("“quoted” École", "“quoted” école"),
])  # fmt: skip
def test_normalisation_by_hand(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


DECOMPOSED = unicodedata.normalize("NFD", "Café à la Noël")


def test_the_same_text_in_another_unicode_form_is_the_same() -> None:
    assert DECOMPOSED != "Café à la Noël"
    assert normalize_answer(DECOMPOSED) == "café à la noël"
    assert exact_match(DECOMPOSED, ["Café à la Noël"])
    assert f1_score("Café", [unicodedata.normalize("NFD", "Café")]) == 1.0


@pytest.mark.parametrize(("prediction", "answers", "expected"), [
    # Common are 2 of 2 and 2 of 3 words.
    ("the cat sat", ["cat sat down"], 0.8),
    # A word counts as often as both texts have it.
    ("cat cat", ["cat"], 2 / 3),
    ("cat cat", ["a cat, a cat!"], 1.0),
    ("dog", ["cat"], 0.0),
    ("The CAT.", ["dog", "cat"], 1.0),
    # The best of several answers counts.
    ("black cat", ["dog", "cat", "black cat and dog"], 2 / 3),
    ("", ["cat"], 0.0),
    ("cat", [""], 0.0),
    ("", [""], 0.0),
    ("cat", [], 0.0),
    ("A", ["a"], 1.0),
    ("the", ["a"], 0.0),
    ("+", ["+"], 1.0),
    ("...", ["cat"], 0.0),
])  # fmt: skip
def test_f1_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert f1_score(prediction, answers) == pytest.approx(expected)


def script_tokens(text: str) -> list[str]:
    lowered = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", lowered).split()


def script_f1(prediction: str, gold: str) -> float:
    predicted, wanted = script_tokens(prediction), script_tokens(gold)
    same = 0
    for word in predicted:
        if word in wanted:
            wanted.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(script_tokens(gold))
    return 2 * precision * recall / (precision + recall)


def test_f1_is_the_scripts_and_agrees_with_exact_match() -> None:
    rng = random.Random(0)
    words = ["cat", "Dog,", "the", "a", "an", "owl.", "É", "“owl”", "x-y", "!"]
    compared = 0
    for _ in range(2000):
        prediction, *answers = (
            " ".join(rng.choices(words, k=rng.randrange(5))) for _ in range(rng.randrange(2, 4))
        )
        score = f1_score(prediction, answers)
        assert 0.0 <= score <= 1.0
        if exact_match(prediction, answers):
            assert score == 1.0
        if all(script_tokens(text) for text in (prediction, *answers)):
            compared += 1
            assert score == pytest.approx(max(script_f1(prediction, a) for a in answers))
    assert compared > 500
