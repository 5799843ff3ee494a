"""The page as a file: complete, closed to the outside, and with nothing of an episode in its markup."""

import base64
import gzip
import hashlib
import json
import re

import pytest

from tests.kit.trace_kit import HOSTILE, add_hostile, made_up_run
from trl_stppo.trace import build_page, read_trace

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
    build_page(run, run / "page.html")
    return (run / "page.html").read_text()


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


def test_nothing_of_an_episode_is_in_its_markup(html):
    own = BLOCK.sub("", html)
    for text in (*HOSTILE[:4], HOSTILE[5], "question-1"):
        assert text not in own
    assert own.count("<script>") == own.count("</script>") == 1
    assert "Episodes of &lt;b&gt;run {{script}}" in own
