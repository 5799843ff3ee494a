"""Playing an environment in the terminal, from a script's standard input."""

import io
import re
from typing import Any

import pytest
from PIL import Image

from trl_stppo.cli.main import main


class Echo:
    """Ends when it hears `end`."""

    def __init__(self, word: str = "end") -> None:
        self.word = word

    async def reset(self, **row: Any):
        return f"Say {row['what']}.", {}

    async def step(self, action: str):
        ended = action == self.word
        return f"<{action}>", 0.5, ended, False, {"valid_action": True}

    async def close(self) -> None:
        print("closed")


class Garden:
    """Two tools and rewards."""

    def reset(self, **row: Any) -> str:
        self.turn_rewards: list[float] = []
        return "A garden."

    def dig(self, depth: int) -> str:
        """Dig a hole.\n\nArgs:\n    depth: how deep."""
        self.turn_rewards.append(depth / 4)
        return f"{depth} deep"

    def rest(self) -> str:
        """Do nothing."""
        return "..."

    def get_reward(self) -> float:
        return 1.0


@pytest.fixture
def play(monkeypatch, capsys):
    """Runs the command in this process: flags and input to exit code and output."""

    def run(text: str, *flags: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return main(["env", "play", *flags]), "".join(capsys.readouterr())

    return run


ECHO = ("test_play_env:Echo", "--row", '{"prompt": "Hi. ", "what": "end"}')
GARDEN = ("test_play_env:Garden",)


def test_an_episode_is_played_to_its_end(play) -> None:
    code, shown = play("a\nend\nnever read\n", *ECHO)
    assert code == 0
    for part in (
        "Hi. \n",
        "Say end.\n",
        "<a>\n",
        "<end>\n",
        "return=1  valid_action=True",
        "closed\n",
    ):
        assert part in shown
    assert "never read" not in shown


def test_tools_are_listed_called_and_paid(play) -> None:
    out = play('dig {"depth": 2}\nrest\ndig {"d": 2}\ndig {\nfly {}\n', *GARDEN)[1]
    assert "--- tool dig(depth: int) -> str\nDig a hole." in out
    assert "--- observation\nA garden.\n" in out
    assert "2 deep\n--- turn 1  reward=0.5  return=0.5\n" in out
    assert "...\n--- turn 2  reward=0  return=0.5\n" in out
    assert out.count("Error: ") >= 3
    assert "=== Garden: 5 turns, return 1.5\n" in out


def test_what_breaks_the_contract_is_one_line(play) -> None:
    code, shown = play("", ECHO[0])
    assert code == 1
    assert "'what'" in shown
    assert "Traceback" not in shown


class Arrows:
    """Shows signs that an old console lacks."""

    def reset(self, **row: Any):
        return "Go \u2192 or \u2603.", {}

    def step(self, action: str):
        return "\u2713", 1.0, True, False, {"valid_action": True}


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_console_that_lacks_a_sign_shows_its_number(encoding, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", console)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert main(["env", "play", "test_play_env:Arrows", "--row", '{"prompt": "p"}']) == 0
    console.flush()
    assert b"\\u2713" in console.buffer.getvalue()


class Door:
    """Shows a picture, and another after each turn."""

    def reset(self, **row: Any):
        return Image.new("RGB", (8, 4), "red"), {}

    def step(self, action: str):
        blocks = [
            {"type": "text", "text": "now"},
            {"type": "image", "image": Image.new("RGB", (2, 3))},
        ]
        return blocks, 1.0, True, False, {}


def test_images_are_written_to_files(play, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, text = play("go\n", "test_play_env:Door", "--row", '{"prompt": "Look."}')
    assert code == 0
    shown = re.findall(r"\[image (\d)x(\d): (.*)\]", text)
    assert [Image.open(path).size for *_, path in shown] == [(8, 4), (2, 3)]
    assert "now\n[image" in text
