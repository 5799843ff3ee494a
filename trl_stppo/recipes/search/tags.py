"""Parse turns in Search-R1's tags, for the environment and the reward functions, in linear time."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["search", "answer", ""]
ACTIONS = ("search", "answer")
TAG = re.compile(r"<(/?)(think|search|answer|information)>")
_OBSERVATION_TAG = re.compile(r"<(/?)information>")


@dataclass(frozen=True)
class Turn:
    """A parsed turn: its action, the action's content, and whether its format is tidy."""

    # The only action; "" without a valid one.
    kind: Kind = ""
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

    Outside of thoughts there must be exactly two tags, those around the action, and words between them.
    Text in `<think>..</think>` is ignored; a turn may begin inside a thought, since chat templates of
    reasoning models put the opening tag into the prompt. Without `thoughts`, `<think>` and
    `<information>` are ordinary text.
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
    if opening.name == "search":
        return Turn("search", content, _is_tidy(text, tags))
    return Turn("answer", content, _is_tidy(text, tags)) if opening.name == "answer" else Turn()


def last_answer(text: str) -> str | None:
    """Return the last complete answer outside of thoughts and observations, stripped, or None.

    For episodes in one string, without ends of turns. The innermost of nested answers counts; one with
    another tag in it does not.
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
