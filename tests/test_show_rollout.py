"""Episodes without a trainer, and the script that shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.tool_model import tool_tokenizer
from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.models.small import tiny_config
from trl_stppo.rollout.episode import Limits
from trl_stppo.trainer.play import play_episodes

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
    episodes = play_episodes(model, tokenizer, CountEnv, ROWS, Limits(60, 3, 5), seed=3)
    assert [episode.row for episode in episodes] == [0, 1, 2]
    for episode in episodes:
        assert episode.stop_reason is not None
        assert 1 <= episode.num_turns <= 3
        assert all(end - start <= 5 for start, end in episode.turn_spans)
        assert episode.has_logprobs
    assert model.training
    again = play_episodes(model, tokenizer, CountEnv, ROWS, Limits(60, 3, 5), seed=3)
    assert [e.ids for e in again] == [e.ids for e in episodes]
    other = play_episodes(model, tokenizer, CountEnv, ROWS, Limits(60, 3, 5), seed=4)
    assert [e.ids for e in other] != [e.ids for e in episodes]
    greedy = SamplingSettings(do_sample=False)
    once = play_episodes(model, tokenizer, CountEnv, ROWS, Limits(60, 3, 5), greedy, seed=1)
    twice = play_episodes(model, tokenizer, CountEnv, ROWS, Limits(60, 3, 5), greedy, seed=2)
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
    episodes = play_episodes(model, tokenizer, None, ROWS, Limits(20), tools=[add])
    assert {str(e.stop_reason) for e in episodes} <= {"no_action", "token_budget"}


def test_nothing_to_play_and_templates_without_tools_are_refused():
    tokenizer = char_tokenizer()
    model = ends_nowhere(tokenizer)
    with pytest.raises(ValueError, match="nothing to play"):
        play_episodes(model, tokenizer, None, ROWS, Limits(20))
    with pytest.raises(ValueError, match="cannot render tool calls"):
        play_episodes(model, tokenizer, None, ROWS, Limits(20), tools=[len])


def run(*flags, **environment):
    command = [sys.executable, str(SCRIPT), *flags]
    import os

    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_script_shows_every_token_of_every_turn():
    plain = run("--index", "3", "--greedy", "--row", '{"prompt": [{"role": "user", "content": '
                '"Which module defines merge?"}], "answers": ["heapq"]}', COLUMNS="100")  # fmt: skip
    assert "\x1b" not in plain
    assert re.search(r"row 0 · prompt · \d+ tokens", plain)
    assert "<|user|>Which module defines merge?<|end|><|assistant|>" in plain
    turns = re.findall(r"turn (\d) · (\d+) tokens · reward", plain)
    assert [int(turn) for turn, _ in turns] == list(range(len(turns)))
    assert f" · {len(turns)} turns · " in plain


@pytest.mark.slow
def test_the_script_colours_a_terminal():
    coloured = run("--index", "3", "--logprobs", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in coloured
