"""Answer a question with the help of a search engine, one tagged action per turn.

The protocol of Search-R1 (Jin et al. 2025, arXiv:2503.09516): `<search>` asks, `<information>`
comes back, `<answer>` ends the episode.
"""

import re
import threading
from typing import Any

from trl_stppo.envs.retrieval import BM25Retriever, Retriever
from trl_stppo.envs.squad import exact_match
from trl_stppo.envs.stdlib_docs import passages

NOTHING_FOUND = "<information> nothing found </information>"
TOLD_SO = "Write <search> words </search> or <answer> words </answer>."

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ACTION_TAG = re.compile(r"</?(?:search|answer)>")
_ANY_TAG = re.compile(r"</?(?:search|answer|information)>")

_default_retriever: Retriever | None = None
_default_retriever_lock = threading.Lock()


class SearchEnv:
    """Question answering over a retriever; reward 1 for an exact match, else 0.

    Every turn must hold exactly one `<search>query</search>` or `<answer>text</answer>`; text
    around it is ignored. Anything else is answered with a reminder and the episode goes on. There
    is no turn limit here: the rollout has one.
    """

    def __init__(
        self,
        retriever: Retriever | None = None,
        *,
        top_k: int = 2,
        max_observation_chars: int = 240,
        invalid_reward: float = 0.0,
    ) -> None:
        """Create an environment; many of them may share one retriever.

        Args:
            retriever: what `<search>` asks; None for BM25 over `stdlib_docs.passages()`, which is
                built on the first search and shared by the whole process.
            top_k: passages shown per search, >= 1.
            max_observation_chars: cap on the shown passages together, in characters, >= 1.
            invalid_reward: reward of a turn without a usable action; 0 or a small negative number.

        Raises:
            ValueError: `top_k` or `max_observation_chars` is smaller than 1.
        """
        for name, value in (("top_k", top_k), ("max_observation_chars", max_observation_chars)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1. Raise it.")
        self._retriever = retriever
        self._top_k = top_k
        self._max_observation_chars = max_observation_chars
        self._invalid_reward = float(invalid_reward)
        self._answers: tuple[str, ...] | None = None  # None: no episode is running

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode from a row with a column `answers`; the prompt is left as it is.

        Raises:
            ValueError: `answers` is missing, empty, or not a sequence of non-empty strings.
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
        self._answers = tuple(answers)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out the one action in the text; see `TextEnv.step` for what is returned.

        Raises:
            RuntimeError: no episode is running.
        """
        if self._answers is None:
            raise RuntimeError("no episode is running: call reset before step, and after an end.")
        kind, content = _parse(action)
        if kind == "answer":
            success = exact_match(content, self._answers)
            self._answers = None
            return "", float(success), True, False, {"valid_action": True, "success": success}
        if kind == "search":
            return self._observe(content), 0.0, False, False, {"valid_action": True}
        return TOLD_SO, self._invalid_reward, False, False, {"valid_action": False}

    def _observe(self, query: str) -> str:
        retriever = _shared_retriever() if self._retriever is None else self._retriever
        found = retriever.search(query, self._top_k)
        # A passage that quotes a tag must not be able to close the block or pose as an action.
        shown = " | ".join(" ".join(_ANY_TAG.sub(" ", passage.text).split()) for passage in found)
        if len(shown) > self._max_observation_chars:
            kept = shown[: self._max_observation_chars + 1]
            # Whole words only, unless the first one is longer than the cap.
            shown = kept.rpartition(" ")[0].rstrip(" |") or kept[:-1]
        return f"<information> {shown} </information>" if shown else NOTHING_FOUND


def _parse(action: str) -> tuple[str, str]:
    """The kind and content of the single action in the text, or ("", "") if there is none."""
    match = _ACTION.search(action)
    # Exactly two action tags: a second action, a stray tag or a nested one make it ambiguous.
    if match is None or len(_ACTION_TAG.findall(action)) != 2 or not match[2].strip():
        return "", ""
    return match[1], match[2].strip()


def _shared_retriever() -> Retriever:
    global _default_retriever
    with _default_retriever_lock:
        if _default_retriever is None:
            _default_retriever = BM25Retriever(passages())
    return _default_retriever
