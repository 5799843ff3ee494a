"""`rollout_overlap`: seconds of a rollout batch with its updates, against the same run in turn.

Sampler and update have a thread of torch each.

    a    tools take 200 ms; as many epochs as make the update about as long as the rollout
    b    tools answer at once, both compute in one process: the interpreter is shared, nothing is claimed
    c    one episode in 32 takes 5 s
    d    tools take 20 to 200 ms; a vLLM server on one core samples, the other core trains (`--server`)
    e    a, to the same success: the synchronous trainer, the overlapped one, TRL's GRPOTrainer

    python benchmarks/overlap.py            # half an hour on two idle cores
    python benchmarks/overlap.py --quick    # under a minute; a and b, one pair each
    .venv-vllm/bin/python benchmarks/overlap.py --server    # d alone, with what `make test-vllm` installs

`ideal` is max(G, U), of the synchronous run's rollout and update. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from _outcome import finish
from datasets import Dataset
from transformers import Qwen2ForCausalLM, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.watch.lines import ProgressLines

EPISODES, TURNS = 32, 4
WAYS: dict[str, dict[str, Any]] = {
    "in turn": {"rollout_staleness": 1},
    "overlapped": {"rollout_overlap": True},
}
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 4, "num_mini_batches": 4, "learning_rate": 1e-3,
    "per_device_train_batch_size": EPISODES // 4, "max_turns": TURNS, "max_turn_tokens": 8,
    "max_completion_length": 96, "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
    "report_to": "none", "save_strategy": "no", "kl_coef": 0.0, "trace_episodes": 0,
    "env_timeout_seconds": None,
}  # fmt: skip


class Tool:
    """Rewards the share of one word. Takes `seconds`, at most `spread` more, a late row `late` more."""

    seconds = late = spread = 0.0

    def reset(self, number: int = 0, **row: Any) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self.turns, self.is_late = 0, number % EPISODES == 0
        self.delays = random.Random(number)
        return "say yes", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer, late."""
        self.turns += 1
        done = self.turns >= TURNS
        extra = self.spread * self.delays.random() + (self.late if done and self.is_late else 0.0)
        time.sleep(self.seconds + extra)
        share = action.count("yes") / max(1, len(action.split()))
        return "again", min(1.0, share), done, False, {"success": share > 0.5}


class Clock(TrainerCallback):
    """Notes when each round ends, and the processor's seconds."""

    def __init__(self, steps: int) -> None:
        self.steps, self.ends, self.cpu = steps, [time.perf_counter()], [time.process_time()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end of a round."""
        if state.global_step % self.steps == 0:
            self.ends.append(time.perf_counter())
            self.cpu.append(time.process_time())


def model_and_tokenizer(width: int) -> tuple[Any, Any]:
    """A small random policy."""
    tokenizer = tiny_tokenizer(["say yes no again", "yes yes no no maybe"] * 4, vocab_size=300)
    torch.manual_seed(0)
    config = tiny_config(tokenizer, hidden_size=width, intermediate_size=4 * width)
    return Qwen2ForCausalLM(config), tokenizer


def rows() -> Dataset:
    """A rollout batch of rows, of which the first is the late one."""
    prompt = [{"role": "user", "content": "say yes"}]
    return Dataset.from_dict({"prompt": [prompt] * EPISODES, "number": [*range(EPISODES)]})


def trainer_for(folder: str, width: int, callback: TrainerCallback, **settings: Any) -> Any:
    """Our trainer of a small random policy."""
    model, tokenizer = model_and_tokenizer(width)
    return STPPOTrainer(
        model=model, args=STPPOConfig(folder, **SETTINGS, **settings), train_dataset=rows(),
        processing_class=tokenizer, environment_factory=Tool, callbacks=[callback],
    )  # fmt: skip


def measured(way: str, blocks: int, epochs: int, width: int, **settings: Any) -> dict[str, float]:
    """Medians over all rounds but the first two and the last, which stand alone."""
    steps, clock = 4 * epochs, Clock(4 * epochs)
    settings |= {"num_ppo_epochs": epochs, "max_steps": steps * blocks}
    if way == "overlapped" or not settings.get("use_vllm"):
        settings |= WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(folder, width, clock, **settings)
        trainer.remove_callback(ProgressLines)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "perf/wait_seconds" in entry][2:-1]
    names = ("perf/generation_seconds", "perf/wait_seconds", "perf/overlap")
    of = {n: statistics.median(entry.get(n, 0.0) for entry in history) for n in names}
    return {
        "block": median_gap(clock.ends),
        "cpu": median_gap(clock.cpu),
        "rollout": of["perf/generation_seconds"] + of["perf/wait_seconds"],
        "overlap": of["perf/overlap"],
        "timeouts": sum(entry.get("stop_reason/env_timeout", 0.0) for entry in history),
    }


def median_gap(times: list[float]) -> float:
    """The median of the seconds between them, without the first two and the last."""
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps[2:-1])


def compared(pairs: int, blocks: int, epochs: int, width: int, **settings: Any) -> dict[str, Any]:
    """Both ways by turns, so that a busy machine slows both."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(pairs):
        for way in WAYS:
            runs[way].append(measured(way, blocks, epochs, width, **settings))
    names = runs["in turn"][0]
    sync, over = ({n: statistics.median(run[n] for run in runs[way]) for n in names} for way in WAYS)
    rollout, update = sync["rollout"], sync["block"] - sync["rollout"]
    ideal = max(rollout, update)
    return {
        "epochs": epochs, "rollout": round(rollout, 3), "update": round(update, 3),
        "in_turn": round(sync["block"], 3), "overlapped": round(over["block"], 3),
        "ideal": round(ideal, 3), "of_ideal": round(over["block"] / ideal, 3),
        "speed": round(sync["block"] / over["block"], 3), "perf_overlap": round(over["overlap"], 3),
        "cpu_ratio": round(over["cpu"] / sync["cpu"], 3), "timeouts": over["timeouts"],
    }  # fmt: skip


def case(name: str, pairs: int, blocks: int, width: int) -> dict[str, Any]:
    """One of a, b and c."""
    Tool.seconds, Tool.late = {"a": (0.2, 0.0), "b": (0.0, 0.0), "c": (0.0, 5.0)}[name]
    epochs = 1 if name == "b" else epochs_as_long_as_the_rollout(blocks, width)
    return compared(pairs, blocks, epochs, width)


def epochs_as_long_as_the_rollout(blocks: int, width: int, **settings: Any) -> int:
    """The epochs that make the update about as long as the rollout."""
    first = measured("in turn", max(6, blocks // 2), 2, width, **settings)
    update = (first["block"] - first["rollout"]) / 2
    return max(1, min(8, round(first["rollout"] / update)))


def served(pairs: int, blocks: int, width: int) -> dict[str, Any]:
    """Case d."""
    from trl.generation import vllm_generation

    from tests.real_vllm.run import FileClient
    from tests.real_vllm.server import Server

    pushes: list[float] = []

    class Client(FileClient):  # TRL's transport of weights needs a GPU; a file stands for it
        def update_named_params(self, *weights: Any) -> None:
            began = time.perf_counter()
            super().update_named_params(*weights)
            pushes.append(time.perf_counter() - began)

    vllm_generation.VLLMClient = Client
    Tool.seconds, Tool.spread, Tool.late = 0.02, 0.18, 0.0
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = model_and_tokenizer(width)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        server = Server(Path(folder) / "log", "--model", folder)
        run_on(1)
        try:
            server.start()
            run_on(0)
            options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
            epochs = epochs_as_long_as_the_rollout(blocks, width, **options)
            figures = compared(pairs, blocks, epochs, width, **options)
        finally:
            server.kill()
    push = round(statistics.median(pushes), 3)
    return {"parameters": model.num_parameters(), "push": push, **figures}


def run_on(core: int) -> None:
    """Bind this process and what it starts to one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


class Watch(TrainerCallback):
    """Ends a training at the first rollout that succeeds so often, and notes the seconds until then."""

    def __init__(self, goal: float) -> None:
        self.goal, self.began, self.reached = goal, time.perf_counter(), None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Look at the rollout's share of successes."""
        share = (logs or {}).get("episode/success_rate", (logs or {}).get("reward", 0.0))
        if self.reached is None and share >= self.goal:
            self.reached = time.perf_counter() - self.began
            control.should_training_stop = True


def share_of_yes(completions: list[Any], **_: Any) -> list[float]:
    """The tool's rewards for TRL, whose episode has all turns in one."""
    time.sleep(TURNS * 0.2)
    texts = [each[-1]["content"] for each in completions]
    return [min(1.0, t.count("yes") / max(1, len(t.split()))) for t in texts]


def trls(folder: str, width: int, callback: TrainerCallback, seed: int) -> GRPOTrainer:
    """TRL's trainer of the same policy."""
    model, tokenizer = model_and_tokenizer(width)
    args = GRPOConfig(
        folder, per_device_train_batch_size=EPISODES, num_generations=8, max_steps=400, seed=seed,
        max_completion_length=TURNS * 8, learning_rate=1e-3, bf16=False, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1, num_iterations=2,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=args, train_dataset=rows(), processing_class=tokenizer,
        reward_funcs=share_of_yes, callbacks=[callback],
    )  # fmt: skip


def to_the_same_success(seeds: int, width: int, goal: float = 0.8) -> dict[str, Any]:
    """Case e: seconds until a rollout succeeds so often; None if none does."""
    Tool.seconds, Tool.late = 0.2, 0.0
    ours = partial(trainer_for, num_ppo_epochs=2, max_steps=800)
    overlapped = partial(ours, rollout_overlap=True)
    ways = {"synchronous": ours, "overlapped": overlapped, "trl": trls}
    seconds: dict[str, Any] = {name: [] for name in ways}
    for seed in range(seeds):
        for name, trainer in ways.items():
            watch = Watch(goal)
            with tempfile.TemporaryDirectory() as folder:
                trainer(folder, width, watch, seed=seed).train()
            seconds[name].append(watch.reached)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--server", action="store_true", help="case d alone")
    options = parser.parse_args()
    quick = options.quick
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    pairs, blocks, width = (1, 5, 64) if quick else (3, 10, 96)
    figures: dict[str, Any] = {"quick": quick, "load": os.getloadavg()[0]}
    if options.server:
        for name, width in {"d": 192, "d, larger": 640}.items():
            figures[name] = served(pairs, blocks, width)
            print(name, figures[name], flush=True)
        return finish(figures)
    for name in ("a", "b") if quick else ("a", "b", "c"):
        figures[name] = case(name, pairs, blocks, width)
        print(name, figures[name], flush=True)
    if not quick:
        figures["e"] = to_the_same_success(seeds=5, width=width)
    finish(figures)


if __name__ == "__main__":
    main()
