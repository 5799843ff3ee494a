"""Answer matching of the SQuAD evaluation script (Rajpurkar et al. 2016, arXiv:1606.05250).

Both sides go through the same normalisation, so identifiers stay comparable: `os.path` and `_abc`
become `ospath` and `abc` whether they are predicted or gold.

One thing is ours: texts are composed (Unicode NFC) first. The script compares code points, so it
takes a decomposed "é" for another letter, and the decomposed "à" for an article with an accent
left over. On composed text, which is what the data sets hold, nothing differs from the script. Only
ASCII punctuation is dropped, and accents and width variants stay apart, as in the script.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Compose, lower-case, drop ASCII punctuation and English articles, collapse white space."""
    without_punctuation = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def comparable(text: str) -> str:
    """The normalised text; where nothing is left of it, the text itself, lower-cased.

    Otherwise the answer "a" or "+" would match every empty prediction.
    """
    return normalize_answer(text) or " ".join(unicodedata.normalize("NFC", text).lower().split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction equals one of the gold answers after normalisation.

    Texts that normalise to nothing match only themselves (see `comparable`); nothing matches "".

    Args:
        prediction: what the model answered.
        answers: the accepted answers; any one of them is enough.
    """
    predicted = comparable(prediction)
    return bool(predicted) and any(predicted == comparable(answer) for answer in answers)


def f1_score(prediction: str, answers: Iterable[str]) -> float:
    """The F1 of the prediction's and an answer's words, the best over the answers; 0 without any.

    Words are counted with repetition, after the normalisation of `exact_match`, whose matches all
    score 1. An empty side scores 0.

    Returns:
        A number in [0, 1].
    """
    predicted = Counter(comparable(prediction).split())
    return max((_overlap(predicted, Counter(comparable(a).split())) for a in answers), default=0.0)


def _overlap(predicted: Counter[str], gold: Counter[str]) -> float:
    common = (predicted & gold).total()
    # 2PR / (P + R) with P = common / predicted and R = common / gold.
    return 2.0 * common / (predicted.total() + gold.total()) if common else 0.0
