"""The page as a file: complete, closed to the outside, and with nothing of an episode in its markup."""

import argparse
import base64
import gzip
import hashlib
import json
import re

import pytest

from tests.kit.trace_kit import HOSTILE, add_hostile, made_up_run
from trl_stppo.trace import build_page, page, read_trace

BLOCK = re.compile(r'<script type="application/octet-stream" id="([\w-]+)">([\w+/=]*)</script>')


def blocks(html: str) -> dict[str, object]:
    packed = {name: base64.b64decode(text) for name, text in BLOCK.findall(html)}
    return {name: json.loads(gzip.decompress(data)) for name, data in packed.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace") / "<b>run {{script}}"
    made_up_run(folder, updates=10, per_update=3)
    add_hostile(folder, 11)
    return folder


@pytest.fixture(scope="module")
def html(run):
    return build_page(run, run / "page.html").path.read_text()


def test_it_holds_every_episode(run, html):
    held, episodes = blocks(html), list(read_trace(run))
    listed = held["list-data"]
    assert [row["key"] for row in listed["rows"]] == [e.key for e in episodes]
    for number, episode in enumerate(episodes):
        shown = held[f"episode-{number}"]
        assert "".join(shown["pieces"]) == episode.text
        pairs = zip(shown["advantages"], episode.advantages, strict=True)
        assert all(a is b is None or a == pytest.approx(b, rel=1e-3) for a, b in pairs)
        assert shown["turn_spans"] == [list(span) for span in episode.turn_spans]
    assert episodes[3].text in held["texts"][3]


def test_its_policy_allows_its_own_script_and_nothing_else(html):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    style = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)[0]
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_it_needs_no_network_and_writes_no_markup(html):
    own = BLOCK.sub("", html).replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"^\s*//.*$|  // .*$|; // .*$|, // .*$", "", own, flags=re.MULTILINE)
    assert not re.search(r"\bsrc=|\bhref=|url\(|@import|innerHTML|outerHTML|insertAdjacent", own)


def test_nothing_of_an_episode_is_in_its_markup(html):
    own = BLOCK.sub("", html)
    for text in (*HOSTILE[:4], HOSTILE[5], "question-1"):
        assert text not in own
    assert own.count("<script>") == own.count("</script>") == 1
    assert "Episodes of &lt;b&gt;run {{script}}" in own


def test_of_many_episodes_some_are_taken_evenly(run):
    page = build_page(run, run / "few.html", max_episodes=4)
    assert (page.episodes, page.recorded) == (4, 34)
    rows = blocks(page.path.read_text())["list-data"]["rows"]
    assert [row["key"] for row in rows] == ["train-1-0", "train-4-2", "train-8-1", "train-11-0"]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    page.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_writes_the_page_into_the_run(run, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(page.webbrowser, "open", shown.append)
    assert page.run(options(str(run), "--max_episodes", "5", "--open")) == 0
    assert shown == [(run / "trace.html").resolve().as_uri()]
    assert re.search(r"trace.html: 5 of 34 episodes, 0\.\d MiB", capsys.readouterr().out)
    assert page.run(options(str(run), "--output", str(run / "new" / "p.html"))) == 0
    assert len(blocks((run / "new" / "p.html").read_text())["list-data"]["rows"]) == 34
