"""Search-R1's protocol: prompts that explain it, parsing of turns in linear time, layout of passages."""

import bisect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .retrieval import Passage

ACTIONS = ("search", "answer")
TAG = re.compile(r"<(/?)(think|search|answer|information)>")
_OBSERVATION_TAG = re.compile(r"<(/?)information>")
Style = Literal["search-r1", "plain"]
STYLES = ("search-r1", "plain")
NOTHING_FOUND = "<information> nothing found </information>"
_FRAME = {"search-r1": "<information>{}</information>", "plain": "<information> {} </information>"}
# Prompts to put before the question.
_PROTOCOL = (
    "Answer the question below. In each turn, first reason inside <think> and </think>; then do "
    "exactly one thing.\n"
    "- If you lack knowledge, search: <search> query </search>. The best passages come back between "
    "<information> and </information>. You may search again with another query.\n"
    "- Once you know enough, answer: {answer} This ends the task.\n"
    "Never write an <information> block yourself.\n\nQuestion: "
)

SEARCH_PROMPT = _PROTOCOL.format(
    answer="<answer> the answer alone, in a few words </answer>, for example <answer> Beijing </answer>."
)
SEARCH_PROMPT_CHOICES = _PROTOCOL.format(
    answer="<answer> the letter of the right choice </answer>, for example <answer> B </answer>."
)


@dataclass(frozen=True)
class Turn:
    """A parsed turn: its action, the action's content, and whether its format is tidy."""

    # The only action, "search" or "answer"; "" if there is no valid action.
    kind: str = ""
    # The action's text, stripped; not empty if there is an action.
    content: str = ""
    # Whether the turn is one thought with words, then the action, and nothing else.
    tidy: bool = False


class _Tag(NamedTuple):
    # "thought" for a complete thought, from its opening to its end.
    name: str
    closing: bool
    start: int
    end: int


def read_turn(text: str, *, thoughts: bool = True) -> Turn:
    """Parse the search or the answer in the text of a turn.

    Outside of thoughts there must be exactly two tags, around the action, and words between them. Text in
    `<think>..</think>` is ignored. A turn may begin inside a thought, because chat templates of reasoning
    models put the opening tag into the prompt. Without `thoughts`, `<think>` and `<information>` are text.
    """
    if thoughts:
        tags = _with_whole_thoughts(text)
    else:
        tags = [_tag(match) for match in TAG.finditer(text) if match[2] in ACTIONS]
    places = [place for place, tag in enumerate(tags) if tag.name != "thought"]
    if len(places) != 2 or places[1] != places[0] + 1:
        return Turn()
    opening, ending = (tags[place] for place in places)
    content = text[opening.end : ending.start].strip()
    if opening.closing or not ending.closing or ending.name != opening.name or not content:
        return Turn()
    if opening.name not in ACTIONS:
        return Turn()
    return Turn(opening.name, content, _is_tidy(text, tags))


def last_answer(text: str) -> str | None:
    """Return the last complete answer outside of thoughts and observations, stripped, or None.

    It is for episodes in one string, without ends of turns. The innermost of nested answers counts. An
    answer with another tag in it does not count.
    """
    answer = None
    for turn in _outside_of_observations(text):
        start = None
        for tag in _with_whole_thoughts(turn):
            if tag.name == "answer" and tag.closing and start is not None:
                answer = turn[start : tag.start].strip()
            start = tag.end if tag.name == "answer" and not tag.closing else None
    return answer


def turns_of(text: str) -> list[str]:
    """Split an episode in one string into its turns, which are the texts between observations."""
    return [turn for turn in _outside_of_observations(text) if turn.strip()]


def _tag(match: re.Match[str]) -> _Tag:
    return _Tag(match[2], bool(match[1]), match.start(), match.end())


def _with_whole_thoughts(text: str) -> list[_Tag]:
    """Return a text's tags. A complete thought is one tag; an unclosed thought is its opening tag."""
    found: list[_Tag] = []
    thought: _Tag | None = None
    first = True
    for match in TAG.finditer(text):
        if thought is not None:
            if match[0] == "</think>":
                found.append(_Tag("thought", False, thought.start, match.end()))
                thought = None
        elif match[0] == "<think>":
            thought, first = _tag(match), False
        elif match[0] == "</think>" and first:
            # The thought was opened before the turn.
            found, first = [_Tag("thought", False, 0, match.end())], False
        else:
            found.append(_tag(match))
    return found if thought is None else [*found, thought]


def _is_tidy(text: str, tags: list[_Tag]) -> bool:
    """Return whether the turn is exactly a thought (words without tags) and then the action."""
    if [tag.name == "thought" for tag in tags] != [True, False, False]:
        return False
    thought, opening, ending = tags
    outside = text[: thought.start] + text[thought.end : opening.start] + text[ending.end :]
    inside = text[thought.start : thought.end].removeprefix("<think>").removesuffix("</think>")
    return not outside.strip() and bool(inside.strip()) and TAG.search(inside) is None


def _outside_of_observations(text: str) -> list[str]:
    """Return the texts between `<information>` blocks. An unclosed block extends to the end."""
    found, start, inside = [], 0, False
    for tag in _OBSERVATION_TAG.finditer(text):
        if bool(tag[1]) == inside:
            if not inside:
                found.append(text[start : tag.start()])
            inside, start = not inside, tag.end()
    return found if inside else [*found, text[start:]]


def framed(shown: str, style: Style) -> str:
    """Return the text of passages in an `<information>` block, or `NOTHING_FOUND` for an empty text."""
    return _FRAME[style].format(shown) if shown else NOTHING_FOUND


def fit(passages: Sequence[Passage], style: Style, fits: Callable[[str], bool]) -> str:
    """Join passages into one text, and return its longest beginning that fits.

    "search-r1" numbers the passages, with titles, one per line; "plain" joins the texts with " | ". The text
    ends in a whole word if at least one word fits. A heading that leaves no room for a word is dropped.
    `fits` is called about 1 + log2(words) times.
    """
    # `cuts` are the allowed ends. If not even a heading fits, `first` is cut: the first passage without one.
    shown, cuts, first = "", [0], ""
    for number, passage in enumerate(passages, start=1):
        text, title = _one_line(passage.text), _one_line(passage.title)
        if style == "plain":
            shown += " | " if number > 1 else ""
        else:
            heading = f'Doc {number}(Title: "{title}") ' if title else f"Doc {number} "
            shown += ("\n" if number > 1 else "") + heading
            if not text:
                cuts.append(len(shown))
        cuts += _word_ends(text, len(shown))
        shown += text
        first = first or text or title
    if fits(shown):
        return shown
    return (
        _longest(shown, cuts, fits)
        or _longest(first, [0, *_word_ends(first)], fits)
        or _longest(first, range(len(first) + 1), fits)
    )


def _word_ends(text: str, start: int = 0) -> list[int]:
    return [start + word.end() for word in re.finditer(r"\S+", text)]


def _longest(shown: str, ends: Sequence[int], fits: Callable[[str], bool]) -> str:
    """Return the longest beginning that fits, by bisection over `ends`. The empty text always fits."""
    too_long = bisect.bisect(ends, False, 1, key=lambda end: not fits(shown[:end]))
    return shown[: ends[too_long - 1]]


def _one_line(text: str) -> str:
    """Return a passage's text on one line, without tags that could close the block or be an action."""
    return " ".join(TAG.sub(" ", text).split())
