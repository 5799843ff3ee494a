"""Synthetic passages and queries for `retrieval.py`, with the word frequencies of real text."""

from __future__ import annotations

import string
from collections.abc import Iterator

import numpy as np

from trl_stppo.recipes.search.retrieval import Passage

# The words that open the ranking; Zipf's law gives the first of them about one word in fifteen.
_FREQUENT = (
    "the of and in to a was is for as on with by he at that from his it an were which are this had "
    "or be also first has one their its after who not her they new two but have been other when "
    "during there all into school time may years more most only over city some world would where "
    "later up such used many can state about national out known made united three states then part"
)
SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
VOCABULARY, EXPONENT = 1_000_000, 1.05
WORDS, SPREAD = 100, 20


class Language:
    """Draws words by rank, as Zipf and Mandelbrot have it: 1 / (rank + 2.7) ** 1.05."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        weights = (np.arange(1, vocabulary + 1) + 2.7) ** -EXPONENT
        self._cumulative = np.cumsum(weights / weights.sum())
        frequent = _FREQUENT.split()
        self._words = [*frequent, *map(_word, range(vocabulary - len(frequent)))]

    def draw(self, random: np.random.Generator, count: int) -> list[str]:
        """So many words."""
        ranks = np.searchsorted(self._cumulative, random.random(count))
        return [self._words[rank] for rank in np.minimum(ranks, len(self._words) - 1).tolist()]


def passages(count: int, language: Language, seed: int = 0) -> Iterator[Passage]:
    """Passages of about a hundred words, with titles of two."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        words = language.draw(random, max(10, round(random.normal(WORDS, SPREAD))))
        title = " ".join(words[-2:]).title()
        yield Passage(title, " ".join(words))


def queries(count: int, language: Language, corpus: list[Passage], seed: int = 1) -> list[str]:
    """Questions of 4 to 12 words: half as the language draws them, half taken from a passage.

    Every second one begins as questions do, with words that are everywhere.
    """
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        length = int(random.integers(4, 13))
        words = language.draw(random, length)
        if number % 2:
            source = corpus[int(random.integers(len(corpus)))].text.split()
            words = [source[place] for place in random.integers(0, len(source), length)]
        found.append(" ".join(["which", "of", "the", *words] if number % 4 < 2 else words))
    return found


def _word(number: int) -> str:
    """A pronounceable word for each number, shorter for smaller ones."""
    syllables = []
    number += len(SYLLABLES)
    while number:
        number, place = divmod(number, len(SYLLABLES))
        syllables.append(SYLLABLES[place])
    return "".join(syllables) + string.ascii_lowercase[len(syllables)]
