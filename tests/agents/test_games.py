"""Games of TextArena and of verifiers train by the lines that the page shows: `make test-agents`."""

import asyncio
import os
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.kit.builders import Kept, build
from trl_stppo.envs import check_env

pytestmark = pytest.mark.agents

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
PROMPT = [{"role": "user", "content": "Play."}]
# game -> the moves of a player who does not think, and an invalid one
GAMES = {
    "GuessTheNumber-v0-raw": ([f"[{number}]" for number in (2, 6, 9, 13, 17)], "seven"),
    "FrozenLake-v0-raw": (["[right]", "[down]"], "[jump]"),
}


def shown(name: str) -> dict[str, Any]:
    """What the page's block that imports a package defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    [block] = [block for block in blocks if re.search(rf"^import {name}\b", block, re.M)]
    lines = [line for line in block.splitlines() if line and "import" not in line]
    assert len(lines) <= 15
    namespace: dict[str, Any] = {}
    exec(compile(block, f"{PAGE}: {name}", "exec"), namespace)
    return namespace


def trained(
    folder: Path, model: Any, tokenizer: Any, rows: list[Any], endpoint: bool = False, **player: Any
) -> list[Any]:
    """Train for three updates, which change weights; return the episodes, of different rewards."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    arguments = {"model": model, "processing_class": tokenizer, "reward_funcs": None}
    trainer = build(
        folder, Kept, arguments=arguments | player | {"train_dataset": Dataset.from_list(rows)},
        max_steps=3, num_mini_batches=1, gradient_accumulation_steps=1, learning_rate=1e-4,
        per_device_train_batch_size=len(rows), max_turns=4, max_turn_tokens=12,
        max_completion_length=1200, agent_endpoint=endpoint,
    )  # fmt: skip
    trainer.train()
    assert len(trainer.rollouts) == 3
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)
    episodes = [episode for rollout in trainer.rollouts for episode in rollout.episodes]
    assert [episode.error for episode in episodes] == [None] * len(episodes)
    assert len({sum(episode.turn_rewards) for episode in episodes}) > 1
    return episodes


@pytest.mark.parametrize("name", GAMES)
def test_a_game_of_textarena_trains(name: str, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    from taught import taught

    moves, invalid = GAMES[name]
    factory = partial(shown("textarena")["TextArenaEnv"], name)
    rows = [{"prompt": PROMPT, "seed": seed} for seed in range(4)] * 2
    check_env(factory, rows=rows, actions=moves)

    async def invalid_moves() -> None:
        env = factory()
        await env.reset(seed=0)
        for action, is_valid in ((invalid, False), (moves[1], True), (invalid, False)):
            observation, reward, terminated, _, info = await env.step(action)
            assert (terminated, reward, info["valid_action"]) == (False, 0.0, is_valid)
            assert ("invalid move" in observation) == (not is_valid)
        _, _, terminated, _, info = await env.step(invalid)
        assert (terminated, info["valid_action"]) == (True, False), "a second one in a row ends it"

    asyncio.run(invalid_moves())

    async def careless(seed: int) -> list[Any]:
        env, player, calls = factory(), random.Random(seed), []
        text, _ = await env.reset(seed=seed)
        said = [{"role": "user", "content": PROMPT[0]["content"] + text}]
        for _ in range(3):
            move = player.choice(moves)
            calls.append((list(said), [], move))
            text, _, terminated, *_ = await env.step(move)
            if terminated:
                break
            said += [{"role": "assistant", "content": move}, {"role": "user", "content": text}]
        return calls

    calls = [call for seed in range(4) for call in asyncio.run(careless(seed))]
    model, tokenizer = taught(calls, loss=0.1, steps=150)
    episodes = trained(tmp_path, model, tokenizer, rows, environment_factory=factory)
    valid = [turn for episode in episodes for turn in episode.valid_actions]
    assert sum(valid) > 0.5 * len(valid)
    assert max(len(episode.turn_rewards) for episode in episodes) > 1


def test_a_taskset_of_verifiers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    data = pytest.importorskip("nltk.data")
    from taught import taught

    # The lists that TextArena's word games download.
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text("oat\ntea\ntoe\n")
    monkeypatch.setattr(data, "path", [str(tmp_path)])
    # The harness calls uv.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    page = shown("verifiers")
    opening = [
        {"role": "system", "content": page["tasks"][0].data.system_prompt},
        {"role": "user", "content": page["tasks"][0].data.prompt},
    ]
    calls = [(opening, [], f"[{letter}]") for letter in ("O", "A", "T", "E", "OAT", "TEA", "TOE")]
    model, tokenizer = taught(calls, loss=0.2, steps=60)
    rows = [{"task": number} for number in range(4)]
    episodes = trained(tmp_path / "run", model, tokenizer, rows, endpoint=True, agent=page["play"])
    assert max(len(episode.turn_rewards) for episode in episodes) > 1
