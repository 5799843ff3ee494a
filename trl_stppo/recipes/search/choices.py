"""Read the letter that an answer gives to a question with lettered choices."""

import re
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase

from trl_stppo.recipes.search.squad import comparable

Choices = Mapping[str, str] | Sequence[str]

# A letter that is a word, then the rest: "B", "(b)", "**B.**", "B) text".
_LETTER = re.compile(r"""[\s(\[*_$"]*([A-Za-z])(?![^\W_])[\s)\]*_$".:,;]*(.*)""", re.DOTALL)


def letter_of(text: object, choices: Choices | None = None) -> str | None:
    """Return the upper-case letter that a text consists of, or None. It never raises.

    The text is a letter alone ("B", "(b)", "B."), or a letter and the text of that choice ("B) text").

    Args:
        text: the answer; other types than strings choose nothing.
        choices: letter -> text, or texts in the order of letters; without them A to Z are allowed.
    """
    found = _LETTER.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    letter, texts = found[1].upper(), _by_letter(choices)
    if texts and letter not in texts:
        return None
    return letter if comparable(found[2]) in ("", texts.get(letter, "")) else None


def letter_match(
    prediction: object, answers: Iterable[str], choices: Choices | None = None
) -> bool:
    """Return whether the prediction gives one of the letters `answers`."""
    chosen = letter_of(prediction, choices)
    return chosen is not None and chosen in {letter_of(gold, choices) for gold in answers}


def has_choices(choices: object) -> bool:
    """Return whether a row's `choices` has a text. Open questions may have None in that column."""
    return bool(_by_letter(choices))


def _by_letter(choices: object) -> dict[str, str]:
    """Return the normalised text of each choice by letter, without missing texts."""
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(choices, Mapping):
        pairs = choices.items()
    elif isinstance(choices, Sequence) and not isinstance(choices, str | bytes):
        pairs = zip(ascii_uppercase, choices, strict=False)
    return {str(k).upper(): comparable(str(text)) for k, text in pairs if text is not None}
