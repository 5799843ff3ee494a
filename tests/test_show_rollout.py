"""Episodes without a trainer, and the script that shows them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.script_kit import AGENT
from tests.tool_model import tool_tokenizer
from trl_stppo import Agent
from trl_stppo.cli.main import main
from trl_stppo.hub.settings import AgentSettings
from trl_stppo.models.small import tiny_config

SCRIPT = Path(__file__).parents[1] / "scripts" / "show_rollout.py"
ROWS = [{"prompt": [{"role": "user", "content": f"count {i} "}]} for i in range(3)]


def ends_nowhere(tokenizer):
    """A model that never ends a turn by itself."""
    model = tiny_policy(tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def test_episodes_are_played_without_a_trainer():
    tokenizer = char_tokenizer()
    model = ends_nowhere(tokenizer).train()
    settings = AgentSettings(max_completion_length=60, max_turns=3, max_turn_tokens=5)
    agent = Agent(model, tokenizer, settings)
    episodes = agent.run_many(CountEnv, ROWS, seed=3, greedy=False)
    for episode in episodes:
        assert episode.stop_reason
        assert 1 <= len(episode.turns) <= 3
        assert all(end - start <= 5 for start, end in episode.turn_spans)
        sampled = [episode.logprobs[i] for span in episode.turn_spans for i in range(*span)]
        assert all(logprob < 0 for logprob in sampled)
    assert model.training
    again = agent.run_many(CountEnv, ROWS, seed=3, greedy=False)
    assert [e.ids for e in again] == [e.ids for e in episodes]
    other = agent.run_many(CountEnv, ROWS, seed=4, greedy=False)
    assert [e.ids for e in other] != [e.ids for e in episodes]
    once, twice = (agent.run_many(CountEnv, ROWS, seed=seed) for seed in (1, 2))
    assert [e.ids for e in once] == [e.ids for e in twice]


def test_tools_alone_can_be_played():
    def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: one.
            b: the other.
        """
        return str(a + b)

    tokenizer = tool_tokenizer(["add one and two"])
    torch.manual_seed(0)
    model = type(tiny_policy(char_tokenizer()))(tiny_config(tokenizer))
    agent = Agent(model, tokenizer, AgentSettings(max_completion_length=20))
    episodes = agent.run_many(None, ROWS, tools=[add])
    assert {e.stop_reason for e in episodes} <= {"no_action", "token_budget"}


def test_nothing_to_play_and_templates_without_tools_are_refused():
    tokenizer = char_tokenizer()
    agent = Agent(ends_nowhere(tokenizer), tokenizer)
    with pytest.raises(ValueError, match="nothing to play"):
        agent.run_many(None, ROWS)
    with pytest.raises(ValueError, match="cannot render tool calls"):
        agent.run_many(None, ROWS, tools=[len])


def test_the_agents_own_settings_count_and_a_file_of_training_is_read(
    monkeypatch, tmp_path, capsys
):
    """agent.json beside the model; flags and the file beat it; keys of training are passed over."""
    monkeypatch.chdir(SCRIPT.parents[1])
    shutil.copytree(AGENT, tmp_path / "agent")
    AgentSettings(max_turns=1, max_turn_tokens=3, trainer="STPPOTrainer").save(tmp_path / "agent")
    own = ["--model_name_or_path", str(tmp_path / "agent"), "--environment", f"{__name__}:Endless"]
    words = [*own, "--row", '{"prompt": "Hi"}', "--greedy"]
    assert main(["show", *words]) == 0
    assert len(re.findall(r"turn \d · 3 tokens", capsys.readouterr().out)) == 1
    (tmp_path / "run.yaml").write_text(
        "variant: s-ppo\nlearning_rate: 0.1\nmax_turns: 2\ndry_run: true\n"
    )
    assert main(["show", *words, "--config", str(tmp_path / "run.yaml")]) == 0
    assert len(re.findall(r"turn \d · 3 tokens", capsys.readouterr().out)) == 2
    assert main(["show", *own[2:], "--model_name_or_path", "runs/nowhere"]) == 1
    assert "`model_name_or_path=runs/nowhere` is no file or folder" in capsys.readouterr().err
    assert main(["show", *words, "--learning_rate", "0.1"]) == 2, "on the command line it is a slip"


class Endless:
    def reset(self, **row):
        return ""

    def step(self, action):
        return "on. ", 0.0, False, False, {}


def run(*flags, **environment):
    command = [sys.executable, str(SCRIPT), *flags]
    import os

    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = warm.run(command, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_script_shows_every_token_of_every_turn():
    plain = run("--index", "3", "--greedy", "--row", '{"prompt": [{"role": "user", "content": '
                '"Which module defines merge?"}], "answers": ["heapq"]}', COLUMNS="100")  # fmt: skip
    assert "\x1b" not in plain
    assert re.search(r"row 0 · prompt · \d+ tokens", plain)
    assert "<|user|>Which module defines merge?<|end|><|assistant|>" in plain
    turns = re.findall(r"turn (\d) · (\d+) tokens · reward", plain)
    assert [int(turn) for turn, _ in turns] == list(range(1, len(turns) + 1))
    assert f" · {len(turns)} turns · " in plain


@pytest.mark.slow
def test_the_script_colours_a_terminal():
    coloured = run("--index", "3", "--logprobs", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in coloured
