"""Rollouts on two processes whose episodes have different numbers of turns.

Started by `test_two_rollouts.py` through torch.distributed.run; each rank saves what it saw.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl.chat_template_utils import qwen3_template

from tests.kit.builders import LIMITS, Kept, build
from tests.kit.fakes import CountEnv, char_tokenizer
from tests.kit.tool_model import TEMPLATE
from tests.kit.vllm_server import CompletionsServer, attach
from trl_stppo.generation.cached import CachedBackend

LETTERS = "BCDEFGHI"
TURNS = [1, 4, 2, 1, 5, 1, 3, 1]


class RowEnv(CountEnv):
    """As many turns as the row says; a row may be slow."""

    def reset(self, name: str, turns: int, pause: float, **row: object) -> tuple[str, dict]:
        self.turns, self.pause = turns, pause
        super().reset()
        return name, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        time.sleep(self.pause)
        _, *rest = super().step(action)
        return f"{self.count}", *rest


class RowTools:
    """A tool environment; the script of `parsed` says how often its tool is called."""

    def reset(self, name: str, turns: int, **row: object) -> str:
        self._name, self._turns, self.turn_rewards = name, turns, []
        return f" {name}{turns}"

    def look(self, place: str) -> str:
        """Look somewhere.\n\nArgs:\n    place: where."""
        self.turn_rewards.append(1.0)
        return "nothing"

    def get_reward(self) -> float:
        return float(self._turns)


def dataset(pause: float = 0.0) -> Dataset:
    columns = {"prompt": [[{"role": "user", "content": "say "}]] * 8, "name": list(LETTERS)}
    # The first half of the batch is the first process's.
    return Dataset.from_dict({**columns, "turns": TURNS, "pause": [0.0] * 4 + [pause] * 4})


def trainer_for(folder: Path, world: int, environment: Any, pause: float = 0.0, **options: Any):
    tokenizer = char_tokenizer()
    if environment is RowTools:
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    arguments = {"environment_factory": environment, "train_dataset": dataset(pause)}
    arguments |= {"processing_class": tokenizer, **options.pop("arguments", {})}
    sizes = {"per_device_train_batch_size": 8 // world, "gradient_accumulation_steps": 1}
    sizes |= {"num_mini_batches": 1, "shuffle_dataset": False, "max_steps": 2}
    sizes |= {"ddp_backend": "gloo"} if world > 1 else {}
    limits = {**LIMITS, "max_turns": 6, "max_completion_length": 300}
    trainer = build(folder, Kept, arguments=arguments, **{**sizes, **limits, **options})
    assert trainer.accelerator.num_processes == world
    return trainer


def parsed(trainer: Any) -> None:
    """Let the turns of a tool environment count as calls until the row's number is reached."""
    driver = trainer._player.engine.drivers[None]
    look = {"type": "function", "function": {"name": "look", "arguments": {"place": "desk"}}}

    def message(episode: Any, ids: list[int]) -> dict[str, Any]:
        more = episode.num_turns + 1 < episode.columns["turns"]
        calls = {"tool_calls": [look]} if more else {}
        return {"role": "assistant", "content": trainer._tokenizer.decode(ids), **calls}

    driver.message = message


def seen(trainer: Any) -> dict[str, Any]:
    """What a rank has played, and where it ended up."""
    return {
        "turns": [kept[2].turn_index.amax(dim=1).add(1).tolist() for kept in trainer.kept],
        "ids": [kept[1]["completion_ids"] for kept in trainer.kept],
        "masks": [kept[1]["completion_mask"] for kept in trainer.kept],
        "index": [kept[2].turn_index for kept in trainer.kept],
        "logs": [
            {k: v for k, v in entry.items() if "_seconds" not in k and "per_second" not in k}
            for entry in trainer.state.log_history
        ],
        "weights": [p.detach().clone() for m in (trainer.model, trainer.critic) for p in m.parameters()],
        "columns": [[e.columns["name"] for e in trainer.episodes]],
    }


def trained(folder: Path, world: int, environment: Any) -> dict[str, Any]:
    """Two steps on the training weights."""
    used = []
    original = CachedBackend.step
    CachedBackend.step = lambda self: (used.append(1), original(self))[1]
    try:
        paid = {"turn_reward_funcs": even_turns, "reward_funcs": []}
        trainer = trainer_for(folder, world, environment, arguments=paid)
        if environment is RowTools:
            parsed(trainer)
        trainer.train()
    finally:
        CachedBackend.step = original
    assert used
    return seen(trainer)


def even_turns(turn: list[int], name: list[str], log_metric: Any, **kwargs: Any) -> list[Any]:
    """A turn reward that only some turns get, and figures that only some processes have."""
    for row in name:
        log_metric(f"seen/{row}", 1.0)
    return [0.5 + number if number % 2 == 0 else None for number in turn]


def own_letter(prompt: list[int], request: dict[str, Any]) -> tuple[list[int], list[float]]:
    """A turn that names the row and turn it was sampled for: the letter, and the prompt's length."""
    tokenizer = char_tokenizer()
    text = tokenizer.decode(prompt)
    letter = next((c for c in reversed(text) if c in LETTERS), "?")
    ids = tokenizer(letter * 2)["input_ids"] + [tokenizer.eos_token_id]
    ids = ids[: request["max_tokens"]]
    return ids, [-float(len(prompt))] * len(ids)


def through_server(folder: Path, world: int, pause: float) -> dict[str, Any]:
    """One rollout through TRL's server mode."""
    rank = int(os.environ.get("RANK", "0"))
    trainer = trainer_for(folder, world, RowEnv, pause, max_steps=1)
    server = CompletionsServer(own_letter) if rank == 0 else None
    attach(trainer, server)
    assert trainer._player.sampler.speaks_to_vllm
    started = time.monotonic()
    trainer.train()
    result = seen(trainer)
    result["seconds"] = time.monotonic() - started
    result["logprobs"] = trainer.kept[0][1]["sampling_per_token_logps"]
    result["prompts"] = [len(e.prompt_ids) for e in trainer.episodes]
    return {**result, "requests": server.requests if server else None}


CASES = {
    "text": lambda folder, world: trained(folder, world, RowEnv),
    "tools": lambda folder, world: trained(folder, world, RowTools),
    "server": lambda folder, world: through_server(folder, world, 0.0),
    "slow": lambda folder, world: through_server(folder, world, 0.3),
}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    assert world == 2
    results = {name: case(folder / name, world) for name, case in CASES.items()}
    assert torch.distributed.get_world_size() == 2
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
