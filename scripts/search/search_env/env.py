"""Question answering with a search engine, one tagged action per turn.

The protocol of Search-R1 (Jin et al. 2025, arXiv:2503.09516): the policy thinks in `<think>`, searches
with `<search>`, gets `<information>`, and ends the episode with `<answer>`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .protocol import NOTHING_FOUND, STYLES, Style, fit, framed, read_turn
from .retrieval import (
    STDLIB,
    Retriever,
    Split,
    open_retriever,
    stdlib_search_dataset,
)
from .rewards import (
    exact_match,
    f1_reward,
    f1_score,
    has_choices,
    letter_match,
    letter_of,
)

if TYPE_CHECKING:
    import datasets

TOLD_SO = "Write <search> words </search> or <answer> words </answer>."
METRICS = ("em", "f1", "letter")
CHARS_PER_TOKEN = 4


class SearchEnv:
    """Question answering with a retriever. The answer ends the episode and decides the reward.

    Every turn must contain exactly one `<search>query</search>` or `<answer>text</answer>`. The text in
    `<think>..</think>` and around the action is ignored. A thought without an end, several actions, an
    `<information>` block by the policy, an empty action, or an action with tags in it gets a reminder, and
    the episode goes on. The rollout limits the turns (`max_turns`).
    """

    @classmethod
    def datasets(cls) -> dict[str, Callable[[Split], "datasets.Dataset"]]:
        """Return the data sets that the commands use by default: questions for the default retriever."""
        return {"stdlib-search": stdlib_search_dataset}

    @classmethod
    def figures(cls) -> list[Callable[..., list[float | None]]]:
        """Return the reward functions that an evaluation reports besides the score."""
        return [f1_reward]

    def __init__(
        self,
        retriever: Retriever | str | None = None,
        *,
        top_k: int = 3,
        max_observation_tokens: int | None = 500,
        count_tokens: Callable[[str], int] | None = None,
        max_observation_chars: int | None = None,
        style: Style = "search-r1",
        metric: Literal["em", "f1", "letter"] = "em",
        invalid_reward: float = 0.0,
    ) -> None:
        """Create an environment. Many environments may share one retriever.

        Args:
            retriever: an object, or a name for `open_retriever`, whose retriever the whole process
                shares. None is "stdlib", BM25 over the documentation of Python's library, built on the
                first search.
            top_k: passages per search, >= 1.
            max_observation_tokens: limit of an observation, tags included, >= 1 and enough for the fixed
                texts; None for no limit.
            count_tokens: text -> number of tokens. Without it a token counts as four characters, unless
                `max_observation_chars` is set.
            max_observation_chars: limit of all passages of an observation, in characters, >= 1.
            style: "search-r1" shows numbered passages with titles, one per line; "plain" joins their
                texts with " | ", and treats `<think>` and `<information>` in a turn as ordinary text.
            metric: "em" rewards an exact match with 1; "f1" rewards the F1 of the words; "letter"
                rewards the right letter of a multiple-choice question with 1, and other rows as "em".
            invalid_reward: reward of a turn without a valid action; 0 or a small negative number.
        """
        caps = {"top_k": top_k, "max_observation_tokens": max_observation_tokens}
        caps["max_observation_chars"] = max_observation_chars
        for name, value in caps.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; must be >= 1.")
        for name, choice, allowed in (("style", style, STYLES), ("metric", metric, METRICS)):
            if choice not in allowed:
                raise ValueError(f"{name} is {choice!r}; allowed are {allowed}.")
        if isinstance(retriever, str) and retriever != STDLIB:
            retriever = open_retriever(retriever)
        self._retriever = STDLIB if retriever is None else retriever
        self._top_k, self._style, self._metric = top_k, style, metric
        self._count_tokens = None if max_observation_tokens is None else count_tokens
        self._max_tokens, self._max_chars = max_observation_tokens or 0, max_observation_chars
        if self._count_tokens is not None:
            needed = max(map(self._count_tokens, (NOTHING_FOUND, TOLD_SO)))
            if needed > self._max_tokens:
                raise ValueError(f"max_observation_tokens is {max_observation_tokens}; must be >= {needed}.")
        elif max_observation_tokens is not None and max_observation_chars is None:
            self._max_chars = CHARS_PER_TOKEN * max_observation_tokens
        self._invalid_reward = float(invalid_reward)
        self._answers: tuple[str, ...] | None = None
        self._choices: Any = None
        self._by_letter = False

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode from a row with a column `answers`, a non-empty list of strings.

        With `metric="letter"` a column `choices`, letter -> text or a list of texts, is used too: a
        row with choices is scored by the letter, a row whose choices are empty by exact match. Without
        the column, answers that are all letters are scored by the letter.
        """
        answers = row.get("answers")
        listed = answers if isinstance(answers, list | tuple) else ()
        if not listed or not all(isinstance(text, str) and text.strip() for text in listed):
            raise ValueError(
                f'answers is {answers!r}; must be a non-empty list of strings, for example ["csv"].'
            )
        self._by_letter = self._metric == "letter" and _is_choice(listed, row)
        self._answers, self._choices = tuple(listed), row.get("choices")
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run a turn's search, or score a turn's answer."""
        if self._answers is None:
            raise RuntimeError("no episode is running: call reset before step, and after an end.")
        turn = read_turn(action, thoughts=self._style != "plain")
        if turn.kind == "answer":
            reward, success = self._score(turn.content, self._answers)
            self._answers = None
            return "", reward, True, False, {"valid_action": True, "success": success}
        if turn.kind == "search":
            return self._observe(turn.content), 0.0, False, False, {"valid_action": True}
        return TOLD_SO, self._invalid_reward, False, False, {"valid_action": False}

    def _score(self, answer: str, golds: tuple[str, ...]) -> tuple[float, bool]:
        if self._by_letter:
            success = letter_match(answer, golds, self._choices)
        else:
            success = exact_match(answer, golds)
        return f1_score(answer, golds) if self._metric == "f1" else float(success), success

    def _observe(self, query: str) -> str:
        if isinstance(self._retriever, str):
            self._retriever = open_retriever(self._retriever)
        found = self._retriever.search(query, self._top_k)
        return framed(fit(found, self._style, self._fits), self._style)

    def _fits(self, shown: str) -> bool:
        if self._max_chars is not None and len(shown) > self._max_chars:
            return False
        count = self._count_tokens
        return count is None or count(framed(shown, self._style)) <= self._max_tokens


class StdlibSearchEnv(SearchEnv):
    """`SearchEnv` for questions about Python's standard library.

    Passages are short and plain, as in the training of the demo's model.
    """

    def __init__(self, retriever: Retriever | str | None = None, **options: Any) -> None:
        """Create an environment. `options` are arguments of `SearchEnv` that differ from the demo's."""
        short = {"top_k": 2, "max_observation_tokens": None, "max_observation_chars": 240}
        super().__init__(retriever, **{"style": "plain", **short, **options})


def _is_choice(answers: Sequence[str], row: Mapping[str, Any]) -> bool:
    """Return whether a row is scored by the letter of a choice and not by an exact match."""
    choices = row.get("choices")
    if not has_choices(choices):
        # An empty column marks an open question.
        return "choices" not in row and all(map(letter_of, answers))
    if any(letter_of(gold, choices) for gold in answers):
        return True
    raise ValueError(f"answers is {answers!r}; must have a letter of {choices!r}.")
