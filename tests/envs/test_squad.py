import pytest

from trl_stppo.envs.squad import exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Answer.", "answer"),
        ("a cat, an owl and the dog", "cat owl and dog"),
        ("  two \n\t words ", "two words"),
        ("theatre", "theatre"),  # an article inside a word stays
        ("A", ""),
        ("", ""),
        ("os.path", "ospath"),
        ("_abc", "abc"),
        ("__init__", "init"),
        ("Café ÉCOLE", "café école"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation goes, as in the SQuAD script
        ("3.11", "311"),
    ],
)
def test_normalisation_by_hand(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("csv", ["csv"], True),
        (" The CSV! ", ["csv"], True),
        ("csv module", ["csv"], False),
        ("os.path", ["os.path", "posixpath"], True),
        ("posixpath", ["os.path", "posixpath"], True),
        ("ntpath", ["os.path", "posixpath"], False),
        ("_Printable", ["_Printable"], True),
        ("csv", [], False),
        ("", ["csv"], False),
        ("...", ["csv"], False),
    ],
)
def test_match_against_any_gold(prediction: str, answers: list[str], expected: bool) -> None:
    assert exact_match(prediction, answers) is expected


def test_answers_made_of_articles_or_punctuation_match_only_themselves() -> None:
    assert exact_match("A", ["a"])
    assert not exact_match("the", ["a"])
    assert not exact_match("", ["a"])
    assert exact_match("+", ["+"])
    assert not exact_match("-", ["+"])
    assert not exact_match("", [""])
