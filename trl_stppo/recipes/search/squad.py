"""Answer matching of the SQuAD evaluation script (Rajpurkar et al. 2016, arXiv:1606.05250).

Both sides are normalised, so identifiers stay comparable: `os.path` and `_abc` become `ospath` and `abc`.

One difference: texts are composed (Unicode NFC) first. The script compares code points, so a decomposed
"é" is another letter for it, and the decomposed "à" an article with an accent. On composed text, as in the
data sets, the results are equal.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Normalise an answer: NFC, lower case, single spaces, no ASCII punctuation, no English articles."""
    without_punctuation = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def comparable(text: str) -> str:
    """Return the normalised text, or the lower-cased text if the normalised text is empty.

    Without the second the answer "a" or "+" would match every empty prediction.
    """
    return normalize_answer(text) or " ".join(unicodedata.normalize("NFC", text).lower().split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Return whether the prediction equals one of the gold answers after normalisation.

    Texts that normalise to nothing match only themselves (see `comparable`); nothing matches "".
    """
    predicted = comparable(prediction)
    return bool(predicted) and any(predicted == comparable(answer) for answer in answers)


def f1_score(prediction: str, answers: Iterable[str]) -> float:
    """Return the best word-level F1 of the prediction with an answer, in [0, 1]; 0 without answers.

    Words are counted with repetition, after the normalisation of `exact_match`. An empty side scores 0.
    """
    predicted = Counter(comparable(prediction).split())
    return max((_overlap(predicted, Counter(comparable(a).split())) for a in answers), default=0.0)


def _overlap(predicted: Counter[str], gold: Counter[str]) -> float:
    common = (predicted & gold).total()
    # 2PR / (P + R) with P = common / predicted and R = common / gold.
    return 2.0 * common / (predicted.total() + gold.total()) if common else 0.0
