"""Reads the documentation: pages, fenced blocks, links, and what stands in backticks.

A block that cannot run here (a GPU, a server, the Hub) has `<!-- not run: reason -->` before it, and what
a block needs but its page does not show stands before it as well, in `<!-- run first` ... `-->`; neither
is seen by readers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDE = sorted(DOCS.glob("*.md"))
PAGES = [
    *(ROOT / "README.md", *GUIDE),
    *(page for folder in ("api", "lab") for page in sorted((DOCS / folder).glob("*.md"))),
    ROOT / "scripts" / "configs" / "paper" / "README.md",
]

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>.*)$")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its file, first line of code from 1, language ("" for none), and code.

    `not_run` says why it cannot run here, None if it can; `first` runs before it and readers do not see it.
    """

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None
    first: str

    @property
    def where(self) -> str:
        """The page and the line, as test output names it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, lines, at = [], page.read_text().splitlines(), 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent, fence = len(opening["indent"]), opening["fence"]
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence)
        code = "\n".join(line[indent:] for line in lines[at + 1 : end]) + "\n"
        not_run, first = _comments(lines[:at])
        found.append(Block(page, at + 2, opening["info"].strip(), code, not_run, first))
        at = end + 1
    return found


def _comments(before: list[str]) -> tuple[str | None, str]:
    """Of the comment right before a fence: why it is not run, and the hidden code."""
    text = "\n".join(before).rstrip()
    if not text.endswith("-->"):
        return None, ""
    comment = text[text.rindex("<!--") :]
    reason = NOT_RUN.fullmatch(comment)
    hidden = comment.removeprefix("<!-- run first\n").removesuffix("-->")
    return (reason[1] if reason else None), hidden if comment.startswith("<!-- run first\n") else ""


def prose(page: Path, under: str | None = None) -> str:
    """A page, or what stands under a heading of level 2, without blocks and comments; line numbers stay."""
    kept, inside = [], ""
    for line in page.read_text().splitlines():
        fence = FENCE.match(line)
        if inside or fence:
            kept.append("")
            if inside and line.strip() == inside:
                inside = ""
            elif not inside and fence:
                inside = fence["fence"]
        else:
            kept.append(line)
    text = "\n".join(kept)
    if under is not None:
        before, _, text = text.partition(f"\n## {under}\n")
        assert text, f"{page.name} has no heading {under!r}"
        text = "\n" * (before.count("\n") + 2) + text.split("\n## ")[0]
    return re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def quoted(page: Path, under: str | None = None) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return CODE.findall(prose(page, under))


def links(page: Path) -> list[str]:
    """Targets of the links of a page."""
    return LINK.findall(CODE.sub("", prose(page)))


def table_rows(page: Path, under: str | None = None) -> Iterator[list[str]]:
    """Cells of all table rows of a page, or of one of its sections, headings left out."""
    lines = prose(page, under).splitlines()
    for line, then in zip(lines, [*lines[1:], ""], strict=True):
        if line.lstrip().startswith("|") and not set(line) <= set("| -:"):
            if set(then) <= set("| -:") and then.strip():
                continue
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
