"""Find the letter that an answer text chooses in a question with lettered choices."""

import re
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase

from trl_stppo.recipes.search.squad import comparable

Choices = Mapping[str, str] | Sequence[str]

_LONGEST = 4_000  # characters; an answer is short
_BOXED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_DECORATION = re.compile(r"[*_`$\"\u201c\u201d]")
_CUE = re.compile(r"\b(?:answer|option|choice)\b\s*(?:is\b|was\b|[:=])?\s*[:=]?\s*", re.I)
_CUE_AT_START = re.compile(
    r"\s*(?:(?:the|my|final|correct|best)\s+)*(?:answer|option|choice)\s*(?:is\b|[:=])\s*:?", re.I
)
# "Not (B)" and "isn't (B)" choose nothing.
_NEGATION = re.compile(r"(?:\bnot|n['\u2019]t|\bneither|\bnor|\bexcept)\W*\Z", re.I)
_LABEL_A = re.compile(r"\s*(?:[(\[]\s*[Aa]\s*[)\]]|[Aa]\s*[):\]]|[Aa]\.\s+[A-Z])")
# "(A) is wrong", "(A)? No.", "A: incorrect"; but not "B. No other drug works", which is a new sentence.
_DENIAL = re.compile(
    r"""[\s)\]},:;?\u2013\u2014-]* (?:
        (?:wrong|incorrect)\b
        | no\b(?=\s*(?:[,.;:!\u2013\u2014-]|\Z))
        | not\s+(?:correct|right|true|valid|possible|the|this|it)\b
        | (?:is|was|are|be|seems|looks|could|would|wo|does|do|did|has|have)\s*(?:not|n['\u2019]t)\b
        | can(?:not|['\u2019]t|\s+not)\b
        | (?:is|was|are|seems|looks|must\s+be|can\s+be)\s+(?:clearly\s+|also\s+|definitely\s+)?
          (?:wrong|incorrect|false|untrue|out|impossible|unlikely|excluded|eliminated|ruled\s+out)\b
    )""",
    re.I | re.X,
)
# After a bare letter that is a word too: "The answer is A because it works".
_REASON = re.compile(r"\s+(?:because|since|due|given|based|as)\b", re.I)


def letter_of(text: object, choices: Choices | None = None) -> str | None:
    """Return the upper-case letter that a text chooses, or None for no letter or several.

    It finds a letter alone ("B", "(b)", "B."), a letter as a label ("B) text", "(B) text", "B: text"),
    after a cue ("answer: B", "The answer is (B)", "option B"), one letter in parentheses anywhere
    ("I would take (B)"), and the full text of exactly one of the choices. A bare letter wins over a
    choice with that text. A label before the text of another choice is ambiguous, and so is a text
    that denies a letter ("(A) is wrong, so (B)"). It never raises.

    Args:
        text: the answer; other types than strings choose nothing.
        choices: letter -> text, or texts in the order of letters; without them A to Z are allowed.
    """
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    texts = _by_letter(choices)
    # Both cases: with `re.I` the Kelvin sign would match K.
    letters = "".join(texts) or ascii_uppercase
    letters += letters.lower()
    unboxed = _BOXED.sub(r"\1", _BOXED.sub(r"\1", text))  # \boxed{\text{B}}
    plain = _DECORATION.sub("", unboxed).strip()
    alone = re.fullmatch(rf"[(\[{{]*\s*([{letters}])\s*[)\]}}.,:;!]*", plain)
    if alone:
        return alone[1].upper()
    by_text = _letter_of_text(plain, texts)
    if by_text is not None:
        return by_text
    found = _labels(plain, letters, texts) | _cued(plain, letters, texts)
    found = found or _in_parentheses(plain, letters, texts)
    return found.pop() if len(found) == 1 and "" not in found else None


def letter_match(
    prediction: object, answers: Iterable[str], choices: Choices | None = None
) -> bool:
    """Return whether the prediction chooses one of `answers`, which are letters or texts of choices."""
    chosen = letter_of(prediction, choices)
    golds = [answers] if isinstance(answers, str) else answers
    return chosen is not None and any(chosen == letter_of(gold, choices) for gold in golds)


def has_choices(choices: object) -> bool:
    """Return whether a row's `choices` has a text. Open questions may have None in that column."""
    return isinstance(choices, Mapping | Sequence) and bool(_by_letter(choices))


def _by_letter(choices: Choices | None) -> dict[str, str]:
    """Return the normalised text of each choice by letter, without missing texts."""
    if isinstance(choices, Mapping):
        pairs = [(str(letter).strip().upper(), text) for letter, text in choices.items()]
    elif isinstance(choices, Sequence) and not isinstance(choices, str | bytes):
        pairs = list(zip(ascii_uppercase, choices, strict=False))
    else:
        return {}
    return {
        letter: comparable(str(text))
        for letter, text in pairs
        if text is not None and len(letter) == 1 and letter in ascii_uppercase
    }


def _letter_of_text(text: str, texts: dict[str, str]) -> str | None:
    """Return the letter of the choice whose text is the whole answer, after an optional label or cue."""
    cue = _CUE_AT_START.match(text)
    # The comparison drops articles, and with them the label in "A) wrong".
    labelled = _LABEL_A.match(text) is not None
    forms = {comparable(text), comparable(text[cue.end() :] if cue else text)} - {""}
    found = [
        letter
        for letter, choice in texts.items()
        if (choice in forms and not (labelled and letter != "A"))
        or f"{letter.lower()} {choice}" in forms
    ]
    return found[0] if len(found) == 1 else None


def _labels(text: str, letters: str, texts: dict[str, str]) -> set[str]:
    """Return the letters that begin a line ("B) ..."). A letter that the line contradicts becomes ""."""
    found = set()
    label = rf"^[ \t]*(?:[(\[]([{letters}])[)\]][.:]?|([{letters}])\s*([.):\]]))(?=\s|$)(.*)$"
    for match in re.finditer(label, text, re.M):
        letter, rest = (match[1] or match[2]).upper(), match[4].strip()
        is_name = match[3] == "." and rest[:1].islower()  # "E. coli"
        if texts and is_name and not comparable(rest).startswith(texts[letter]):
            continue
        found.add("" if _contradicts(rest, letter, letters, texts) else letter)
    return found


def _cued(text: str, letters: str, texts: dict[str, str]) -> set[str]:
    """Return the letters after a cue ("answer: B"). A letter that the line contradicts becomes ""."""
    found = set()
    marked = re.compile(rf"[(\[{{]\s*([{letters}])\s*[)\]}}]|([{letters}])(?!\w|['\u2019])")
    for cue in _CUE.finditer(text):
        match = marked.match(text, cue.end())
        if match is None:
            continue
        letter, rest = match[1] or match[2], text[match.end() :].partition("\n")[0]
        contradicted = _contradicts(rest, letter.upper(), letters, texts)
        # "The answer is a cat": bare, "a" and "I" are words too, and so is any small letter.
        is_word = match[2] and (letter in "AI" or letter.islower()) and rest[:1].isspace()
        if is_word and rest.strip() and not contradicted and not _REASON.match(rest):
            continue
        found.add("" if contradicted else letter.upper())
    return found


def _in_parentheses(text: str, letters: str, texts: dict[str, str]) -> set[str]:
    """Return the capital letters in parentheses, as in "(B)". A letter that the text denies becomes ""."""
    found = set()
    for match in re.finditer(rf"(?<!\w)\(([{letters}])\)(?!\w)", text):
        before, rest = text[max(0, match.start() - 20) : match.start()], text[match.end() :]
        if match[1].isupper():
            denied = _NEGATION.search(before) or _denies(rest, match[1], texts)
            found.add("" if denied else match[1])
    return found


def _denies(rest: str, letter: str, texts: dict[str, str]) -> bool:
    """Return whether the text after a letter rejects the letter, as in "(A) is wrong"."""
    choice = texts.get(letter)  # may be "No", or "Not indicated"
    return _DENIAL.match(rest) is not None and not (choice and comparable(rest).startswith(choice))


def _contradicts(rest: str, letter: str, letters: str, texts: dict[str, str]) -> bool:
    """Return whether the text after a letter denies it, or names another letter or choice ("A or B")."""
    another = rf"\s*[)\]}}.]*\s*(?:,\s*(?:or|and)?|/|&|\+|\bor\b|\band\b)\s*[(\[]*[{letters.upper()}](?!\w)"
    if _denies(rest, letter, texts) or re.match(another, rest):
        return True
    return _letter_of_text(rest.lstrip(" :.)]}-\u2013"), texts) not in (None, letter)
