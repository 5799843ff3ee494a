"""A demonstration is, token by token, what the rollout makes of the same commands; the script writes both."""

import json
import subprocess
import sys

import pytest
from datasets import load_dataset

from tests.kit import rollout_kit
from tests.kit.script_kit import ROOT, scripts
from trl_stppo.generation.protocol import TurnResult
from trl_stppo.models.small import tiny_tokenizer
from trl_stppo.rollout.chat import ChatRenderer

with scripts():
    from adventures import demonstration
    from textworld_env import TextWorldEnv

KIND = {"rooms": 2, "objects": 3, "quest_length": 3, "theme": "basic", "train": 2, "test": 1}
FLAGS = [f"--{name}={value}" for name, value in KIND.items()]


def write(folder, *flags):
    """What the script prints."""
    words = [
        sys.executable,
        "scripts/textworld/make_textworld.py",
        *FLAGS,
        *flags,
        "--output",
        str(folder),
    ]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("textworld.generator")
    folder = tmp_path_factory.mktemp("textworld") / "made"
    result = write(folder)
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return load_dataset(str(folder), cache_dir=str(folder.parent / "cache"))


def test_the_splits_share_no_game(rows, folder):
    assert {name: len(split) for name, split in rows.items()} == {"train": 2, "test": 1}
    games = [*rows["train"]["game"], *rows["test"]["game"]]
    assert len({*games}) == 3
    openings = {demonstration(row, TextWorldEnv())[1]["content"] for s in rows.values() for row in s}
    assert len(openings) == 3


def test_demonstrations_are_messages_of_the_training_games(rows, folder):
    lines = (folder / "demonstrations" / "messages.jsonl").read_text().splitlines()
    shown = [json.loads(line)["messages"] for line in lines]
    assert [[m["content"] for m in messages if m["role"] == "assistant"] for messages in shown] == [
        row["walkthrough"] for row in rows["train"]
    ]
    assert [m["role"] for m in shown[0]] == ["system", *["user", "assistant"] * 3]


class Speaker(rollout_kit.ScriptedBackend):
    """Says its script in the tokens of a real tokenizer."""

    tokenizer = None

    def _result(self, request):
        said = self.script(*request.seed[-2:]) + self.tokenizer.eos_token
        return TurnResult(request.key, self.tokenizer(said)["input_ids"], None)


@pytest.mark.parametrize("show", [["feedback"], ["description", "feedback", "inventory"]], ids=len)
def test_a_demonstration_has_the_tokens_of_play(rows, show, monkeypatch):
    row = rows["train"][0]
    messages = demonstration(row, TextWorldEnv(show=show))
    tokenizer = tiny_tokenizer([message["content"] for message in messages])
    monkeypatch.setattr(rollout_kit, "RENDERER", ChatRenderer(tokenizer, [tokenizer.eos_token_id]))
    monkeypatch.setattr(Speaker, "tokenizer", tokenizer)
    engine = rollout_kit.build(lambda: TextWorldEnv(show=show), max_completion_tokens=2000)
    speaker = Speaker(lambda _, turn: row["walkthrough"][turn])
    played = rollout_kit.play(engine, speaker, [row], [row["prompt"]]).only
    engine.close()
    learnt = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert played.success
    assert played.prompt_ids + played.ids == learnt["input_ids"]
    assert [*map(int, played.action_mask)] == learnt["assistant_masks"][len(played.prompt_ids) :]
