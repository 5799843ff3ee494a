"""Links between pages, to files and to headings hold; the table of contents names every page."""

import re
from urllib.parse import urlsplit

import pytest

from tests.kit.docs_kit import DOCS, GUIDE, PAGES, ROOT, anchors, blocks, links

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in links(page):
        url = urlsplit(target)
        if url.scheme:
            assert url.scheme in ("https", "mailto"), target
            assert url.scheme == "mailto" or re.fullmatch(r"[\w.-]+\.[a-z]+", url.netloc), target
            continue
        file = (page.parent / url.path).resolve() if url.path else page
        assert file.is_file(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT), target
        if url.fragment:
            assert url.fragment in anchors(file), f"{page.name} links to {target}"


def test_every_page_is_in_the_table_of_contents():
    trees = [b for b in blocks(DOCS / "index.md") if b.language == "{toctree}"]
    listed = [line for tree in trees for line in tree.code.split() if not line.startswith(":")]
    pages = {line for line in listed if (DOCS / f"{line}.md").is_file()}
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} == pages - {"api/index"}
    captions = re.findall(r":caption: (.+)", "".join(tree.code for tree in trees))
    assert captions == ["Start", "Guide", "Reference", "Contributing"]


def test_the_guide_stays_short():
    """Measurements go to docs/lab, reference into docstrings, what a recipe needs beside it."""
    guide = [page for page in GUIDE if page.name != "contributing.md"]
    assert len(guide) <= 20
    assert sum(len(page.read_text().splitlines()) for page in guide) <= 2800


def test_the_changelog_is_short_and_ends_with_what_replaces_what_is_gone():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 60
    gone = text.rpartition("\n## ")[2].splitlines()
    assert gone[0] == "Gone, and what to use instead"
    lines = [line for line in gone[3:] if line]
    assert lines
    assert all(re.fullmatch(r"- .*`.*: .+\.", line) for line in lines)
    for target in re.findall(r"\]\((\S+?)\)", text):
        assert (ROOT / target).is_file(), target


def test_pages_read_well_on_github():
    """Only the page of contents and the API reference use the syntax of the site."""
    for page in PAGES:
        if page.name != "index.md" and page.parent.name != "api":
            languages = {block.language for block in blocks(page)}
            assert not any("{" in language for language in languages), page
