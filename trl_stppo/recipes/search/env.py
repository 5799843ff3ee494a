"""Answer a question with the help of a search engine, one tagged action per turn.

The protocol of Search-R1 (Jin et al. 2025, arXiv:2503.09516): the policy thinks in `<think>`, asks
with `<search>`, gets `<information>`, and ends the episode with `<answer>`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trl_stppo.recipes.search.choices import has_choices, letter_match, letter_of
from trl_stppo.recipes.search.prompts import SEARCH_PROMPT, SEARCH_PROMPT_CHOICES
from trl_stppo.recipes.search.retrieval import Retriever
from trl_stppo.recipes.search.retrievers.specs import STDLIB, check_name, open_retriever
from trl_stppo.recipes.search.rewards import f1_reward
from trl_stppo.recipes.search.squad import exact_match, f1_score
from trl_stppo.recipes.search.stdlib_docs import Split, stdlib_search_dataset
from trl_stppo.recipes.search.tags import read_turn
from trl_stppo.recipes.search.view import NOTHING_FOUND, STYLES, Style, fit, framed, lay_out

if TYPE_CHECKING:
    import datasets

__all__ = [
    "NOTHING_FOUND",
    "SEARCH_PROMPT",
    "SEARCH_PROMPT_CHOICES",
    "TOLD_SO",
    "SearchEnv",
    "StdlibSearchEnv",
]

TOLD_SO = "Write <search> words </search> or <answer> words </answer>."
METRICS = ("em", "f1", "letter")
CHARS_PER_TOKEN = 4  # of English text, where nobody counts tokens


class SearchEnv:
    """Question answering over a retriever; the last turn is paid by its answer.

    Every turn must hold exactly one `<search>query</search>` or `<answer>text</answer>`. What is
    inside `<think>..</think>` is not looked at, other text around the action neither. A thought
    without an end, several actions, an `<information>` block of the policy's own, an empty action or
    one with tags in it is answered with a reminder, and the episode goes on. There is no turn limit
    here: the rollout has one (`max_turns`).
    """

    @classmethod
    def datasets(cls) -> dict[str, Callable[[Split], "datasets.Dataset"]]:
        """The questions about what the default retriever finds; what commands take unless told."""
        return {"stdlib-search": stdlib_search_dataset}

    @classmethod
    def figures(cls) -> list[Callable[..., list[float | None]]]:
        """What an evaluation reports besides the score."""
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
        """Create an environment; many of them may share one retriever.

        Args:
            retriever: what `<search>` asks: an object, or a name as `open_retriever` takes it, whose
                retriever is shared by the whole process. None is "stdlib", BM25 over the
                documentation of Python's library, built on the first search.
            top_k: passages shown per search, >= 1.
            max_observation_tokens: cap on the whole observation, tags included, >= 1; None for none.
            count_tokens: text -> its number of tokens. Without it a token is taken for four
                characters, unless `max_observation_chars` says something else.
            max_observation_chars: cap on the shown passages together, in characters, >= 1.
            style: "search-r1" shows numbered passages with titles, one per line; "plain" joins their
                texts with " | ", and takes `<think>` and `<information>` in a turn for ordinary text.
            metric: "em" pays 1 for an exact match, else 0; "f1" pays the F1 of the words; "letter"
                pays 1 for the right letter of a multiple-choice question, and on rows that are none
                as "em".
            invalid_reward: reward of a turn without a usable action; 0 or a small negative number.

        Raises:
            ValueError: a setting that is not allowed, or a cap below what the fixed texts take.
            IndexFolderError: `retriever` names a folder without a complete index.
        """
        caps = {"top_k": top_k, "max_observation_tokens": max_observation_tokens}
        caps["max_observation_chars"] = max_observation_chars
        for name, value in caps.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1. Raise it.")
        _check_choice("style", style, STYLES)
        _check_choice("metric", metric, METRICS)
        if isinstance(retriever, str) and retriever != STDLIB:
            check_name(retriever)
            retriever = open_retriever(retriever)
        self._retriever = STDLIB if retriever is None else retriever
        self._top_k, self._style, self._metric = top_k, style, metric
        self._count_tokens = None if max_observation_tokens is None else count_tokens
        self._max_tokens, self._max_chars = max_observation_tokens or 0, max_observation_chars
        if self._count_tokens is not None:
            _check_budget(self._count_tokens, self._max_tokens)
        elif max_observation_tokens is not None and max_observation_chars is None:
            self._max_chars = CHARS_PER_TOKEN * max_observation_tokens
        self._invalid_reward = float(invalid_reward)
        self._answers: tuple[str, ...] | None = None  # None: no episode is running
        self._choices: Any = None
        self._by_letter = False  # how the running episode is paid

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode from a row with a column `answers`; the prompt is left as it is.

        With `metric="letter"` a column `choices`, letter -> text or a list of texts, is used too: a
        row with choices is paid by the letter, one whose choices are empty by exact match. Without
        the column letters are paid where all answers are letters.

        Raises:
            ValueError: `answers` is missing, empty, or not a sequence of non-empty strings, or none
                of them is among the row's choices.
        """
        answers = row.get("answers")
        if (
            not isinstance(answers, list | tuple)
            or not answers
            or not all(isinstance(answer, str) and answer.strip() for answer in answers)
        ):
            raise ValueError(
                f"answers is {answers!r} (columns: {', '.join(sorted(row)) or 'none'}); SearchEnv "
                "needs a non-empty list of strings. Add a column answers to the data set, "
                'for example ["csv"].'
            )
        self._by_letter = self._metric == "letter" and _is_choice(answers, row)
        self._answers, self._choices = tuple(answers), row.get("choices")
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out the one action in the text; see `TextEnv.step` for what is returned.

        Raises:
            RuntimeError: no episode is running.
        """
        if self._answers is None:
            raise RuntimeError("no episode is running: call reset before step, and after an end.")
        turn = read_turn(action, thoughts=self._style != "plain")
        if turn.kind == "answer":
            reward, success = self._judge(turn.content, self._answers)
            self._answers = None
            return "", reward, True, False, {"valid_action": True, "success": success}
        if turn.kind == "search":
            return self._observe(turn.content), 0.0, False, False, {"valid_action": True}
        return TOLD_SO, self._invalid_reward, False, False, {"valid_action": False}

    def _judge(self, answer: str, golds: tuple[str, ...]) -> tuple[float, bool]:
        if self._by_letter:
            success = letter_match(answer, golds, self._choices)
        else:
            success = exact_match(answer, golds)
        return f1_score(answer, golds) if self._metric == "f1" else float(success), success

    def _observe(self, query: str) -> str:
        if isinstance(self._retriever, str):
            self._retriever = open_retriever(self._retriever)
        found = self._retriever.search(query, self._top_k)
        return framed(fit(lay_out(found, self._style), self._fits), self._style)

    def _fits(self, shown: str) -> bool:
        if self._max_chars is not None and len(shown) > self._max_chars:
            return False
        count = self._count_tokens
        return count is None or count(framed(shown, self._style)) <= self._max_tokens


class StdlibSearchEnv(SearchEnv):
    """Questions about Python's standard library, answered by searching its documentation.

    What is found is shown short and plain, which is what the demo's model was taught to read.
    """

    def __init__(
        self,
        retriever: Retriever | str | None = None,
        *,
        top_k: int = 2,
        max_observation_chars: int = 240,
        invalid_reward: float = 0.0,
    ) -> None:
        """Create an environment; arguments as those of `SearchEnv`."""
        super().__init__(
            retriever,
            top_k=top_k,
            max_observation_tokens=None,
            max_observation_chars=max_observation_chars,
            style="plain",
            invalid_reward=invalid_reward,
        )


def _is_choice(answers: Sequence[str], row: Mapping[str, Any]) -> bool:
    """Whether a row is paid by the letter."""
    choices = row.get("choices")
    if not has_choices(choices):
        # A column that is there, and empty, says that the question is open.
        return "choices" not in row and all(
            len(gold.strip("() .")) == 1 and letter_of(gold) for gold in answers
        )
    if any(letter_of(gold, choices) for gold in answers):
        return True
    raise ValueError(
        f"answers is {answers!r}, and choices is {choices!r}; none of the answers is a letter or a "
        "text of the choices, so that no answer could be right. Correct the row, or leave out its "
        "choices."
    )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {allowed}. Pick one of them.")


def _check_budget(count_tokens: Callable[[str], int], cap: int) -> None:
    needed = max(count_tokens(text) for text in (NOTHING_FOUND, TOLD_SO))
    if needed > cap:
        raise ValueError(
            f"max_observation_tokens is {cap}; the fixed texts alone take {needed}. Raise it."
        )
