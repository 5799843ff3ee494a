"""Playing an environment in the terminal, from a script's standard input."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests import warm
from tests.script_kit import question_rows
from trl_stppo.cli import play as play_command

ROOT = Path(__file__).parents[1]


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
        """Dig a hole.

        Args:
            depth: how deep.
        """
        self.turn_rewards.append(depth / 4)
        return f"{depth} deep"

    def rest(self) -> str:
        """Do nothing."""
        return "..."

    def get_reward(self) -> float:
        return 1.0


@pytest.fixture
def play(monkeypatch, capsys):
    """Runs the command in this process: flags and input to output."""

    def run(text: str, *flags: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert play_command.run(list(flags)) == 0
        return capsys.readouterr().out

    return run


ECHO = ("--environment", "test_play_env:Echo", "--row", '{"prompt": "Hi. ", "what": "end"}')
GARDEN = ("--environment", "test_play_env:Garden")


def test_an_episode_is_shown_turn_by_turn(play) -> None:
    assert play("a\nend\nnever read\n", *ECHO) == (
        "--- prompt\nHi. Say end.\n"
        "> a\n--- observation\n<a>\n--- turn 1  reward=0.5  return=0.5  valid_action=True\n"
        "> end\n--- observation (ignored, the episode is over)\n<end>\n"
        "--- turn 2  reward=0.5  return=1  valid_action=True\n"
        "closed\n=== Echo: 2 turns, return 1, terminated\n--- row: what=end\n"
    )


@pytest.mark.parametrize(("text", "turns"), [("", 0), (":q\n", 0), ("a\n", 1), ("a\n:q\nb\n", 1)])
def test_the_end_of_the_input_and_q_stop(play, text, turns) -> None:
    assert (
        f"=== Echo: {turns} turn{'s' * (turns != 1)}, return {turns / 2:g}, stopped by you\n"
        in play(text, *ECHO)
    )


def test_a_backslash_continues_a_turn(play) -> None:
    assert "<a\n:q\nb>" in play("a\\\n:q\\\nb\n", *ECHO)
    assert "<a\n>" not in play("a\\", *ECHO)


def test_arguments_of_the_factory_are_passed(play) -> None:
    kwargs = ("--environment_kwargs", '{"word": "stop"}')
    assert "2 turns, return 1, terminated" in play("end\nstop\n", *ECHO, *kwargs)


def test_tools_are_listed_called_and_paid(play) -> None:
    out = play('dig {"depth": 2}\nrest\ndig {"d": 2}\ndig {\nfly {}\nget_reward\n', *GARDEN)
    schemas = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
    assert [schema["name"] for schema in schemas] == ["dig", "rest"]
    assert "--- prompt\nA garden.\n" in out
    assert "--- result\n2 deep\n--- turn 1  reward=0.5  return=0.5\n" in out
    assert "--- result\n...\n--- turn 2  reward=0  return=0.5\n" in out
    assert out.count("{'error': ") == 4
    assert "Tool fly not found; there are dig, rest." in out
    assert "--- get_reward: 1.0\n=== Garden: 6 turns, return 1.5, stopped by you\n" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "`--environment` is missing, so there is nothing to play"),
        (("--environment", "none"), "`--environment` is missing, so there is nothing to play"),
        ((*ECHO[:2], "--row", "[1]"), r"`row=\[1\]` is no JSON object"),
        (("--model_name_or_path", "a"), "removed in 0.2. `trl-stppo show` prints the tokens"),
    ],
)
def test_wrong_flags_are_explained(play, flags, message) -> None:
    with pytest.raises(ValueError, match=message):
        play("", *flags)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_row_is_taken_from_a_dataset_or_a_stream(play, streaming, tmp_path) -> None:
    rows = question_rows(["nq"] * 3, "train")
    Dataset.from_dict(rows).to_json(str(tmp_path / "train.jsonl"))
    flags = ("--environment", "trl_stppo.recipes.search:StdlibSearchEnv")
    flags += ("--dataset_name", str(tmp_path), "--dataset_streaming", streaming)
    out = play(":q\n", *flags, "--index", "2")
    assert rows["question"][2] in out
    assert rows["question"][1] not in out
    with pytest.raises(ValueError, match=r"`--index 3`: there are (3|fewer) rows, counted from 0"):
        play("", *flags, "--index", "3")


@pytest.mark.slow
def test_the_script_plays_the_demo() -> None:
    pytest.importorskip("bm25s")
    result = warm.run(
        [sys.executable, "scripts/play_env.py", "--index", "3"],
        input="<search>merge</search>\n<answer>x</answer>\n",
        cwd=ROOT,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "user: " in result.stdout
    assert "<information> merge is" in result.stdout
    assert "=== StdlibSearchEnv: 2 turns, return 0, terminated" in result.stdout
