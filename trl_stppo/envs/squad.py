"""Answer matching of the SQuAD evaluation script (Rajpurkar et al. 2016, arXiv:1606.05250).

Both sides go through the same normalisation, so identifiers stay comparable: `os.path` and `_abc`
become `ospath` and `abc` whether they are predicted or gold.
"""

import re
import string
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and English articles, collapse white space."""
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction equals one of the gold answers after normalisation.

    A text that normalises to nothing falls back to the text itself, stripped and lower-cased:
    otherwise the answer "a" or "+" would match every empty prediction.

    Args:
        prediction: what the model answered.
        answers: the accepted answers; any one of them is enough.
    """
    predicted = _key(prediction)
    return bool(predicted) and any(predicted == _key(answer) for answer in answers)


def _key(text: str) -> str:
    return normalize_answer(text) or text.strip().lower()
