"""A training with a real vLLM, and what was seen of it.

Started as `python -m tests.real_vllm.run <settings.json>`, on one process or through torch.distributed.run;
writes `rank<r>.json` beside the settings. These are: `flags`, of `trl-stppo train`, over those of the demo,
and `engine`, of `vllm.LLM` where that is colocated.
"""

import functools
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from vllm import SamplingParams

from tests.kit.waiting import wait_until
from tests.real_vllm import server_side  # noqa: F401 (keeps weights as they are)
from tests.real_vllm.server import answers
from trl_stppo.cli.agents import parse_flags
from trl_stppo.cli.flags import TrainArguments
from trl_stppo.cli.train import make_trainer
from trl_stppo.trainer.training_loop import TrainingLoop

# Three rollouts of 32 episodes, four optimizer steps after each.
FLAGS = {
    "config": "scripts/configs/demo.yaml", "gradient_accumulation_steps": 4, "num_mini_batches": 2,
    "num_ppo_epochs": 2, "total_episodes": 96, "eval_episodes": 0, "trace_episodes": 0,
    "logging_steps": 1, "use_vllm": True, "vllm_gpu_memory_utilization": 0.05,
    "vllm_max_model_length": 1024,
}  # fmt: skip
# Tokens whose log-probabilities tell which weights an engine has.
SEQUENCE = [*range(10, 42)]

Logprobs = Callable[[], list[float]]


class FileClient(VLLMClient):
    """Hands weights over as a file, since TRL's transport takes CUDA alone."""

    pushed: set[str] = set()  # noqa: RUF012 (of all clients: there is one)

    def init_communicator(self, device: Any = 0) -> None:
        """There is none."""

    def update_named_params(self, metadata: Any, named_params: Iterable[tuple[str, Any]]) -> None:
        """Write, and have the server's workers read."""
        # Copies: an adapter is merged while they are walked, and no longer.
        weights = {name: p.detach().clone().contiguous() for name, p in named_params}
        self.pushed.update(weights)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/weights.safetensors"
            save_file(weights, path)
            call = {"method": "load_weights_of", "args": [path]}
            self._post(f"{self.base_url}/collective_rpc", json=call)


class Observer(TrainerCallback):
    """Notes how rollouts end, and whose weights the engine has after each of them and after each step."""

    def __init__(self, trainer: Any, engine: Logprobs | None) -> None:
        self._trainer, self._engine = trainer, engine
        self.rollouts: list[list[dict[str, Any]]] = []
        self.probes: list[dict[str, Any]] = []

    def add_rollout(self, rollout: Any) -> None:
        about = [(e.stop_reason, e.num_turns, e.error) for e in rollout.episodes]
        names = ("stop_reason", "turns", "error")
        self.rollouts.append([dict(zip(names, each, strict=True)) for each in about])
        self._probe("rollout")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._probe("step")

    def _probe(self, when: str) -> None:
        if self._engine is not None:
            seen = {"engine": self._engine(), "trainer": own_logprobs(self._trainer)}
            self.probes.append({"when": when, **seen})


def own_logprobs(trainer: Any) -> list[float]:
    """The trainer's own of `SEQUENCE`, of its first token none."""
    ids = torch.tensor([SEQUENCE])
    model = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(
            model, ids, torch.ones_like(ids), len(SEQUENCE) - 1
        )
    return logprobs[0].tolist()


def colocated_logprobs(trainer: Any) -> list[float]:
    """Those of the engine in this process, with the adapter that it samples with."""
    llm, adapter = trainer.vllm_generation.llm, trainer._player.sampler.vllm._adapter
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = {"prompt_token_ids": SEQUENCE}
    (output,) = llm.generate([prompt], sampling_params=sampling, use_tqdm=False, lora_request=adapter)
    told = zip(SEQUENCE[1:], output.prompt_logprobs[1:], strict=True)
    return [logprobs[token].logprob for token, logprobs in told]


def served_logprobs(url: str) -> list[float]:
    """Those of a server, which may have to come back first."""
    wait_until(lambda: answers(url))
    body = {"prompt": SEQUENCE, "max_tokens": 1, "prompt_logprobs": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request) as answer:
        (choice,) = json.loads(answer.read())["choices"]
    told = zip(SEQUENCE[1:], choice["prompt_logprobs"][1:], strict=True)
    return [logprobs[str(token)]["logprob"] for token, logprobs in told]


def record_names(llm: Any) -> None:
    """Note the names of all that is loaded into a colocated engine from now on."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    load = model.load_weights

    def named(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, weight in weights:
            FileClient.pushed.add(name)
            yield name, weight

    model.load_weights = lambda weights: load(named(weights))


def build(settings: dict[str, Any], folder: Path) -> tuple[Any, Observer]:
    flags = {**FLAGS, "output_dir": folder / "run", **settings.get("flags", {})}
    engine = {"enforce_eager": True, **settings.get("engine", {})}
    vllm_generation.VLLMClient = FileClient
    if flags["vllm_mode"] == "colocate":
        flags["vllm_engine_kwargs"] = json.dumps(engine)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    args, training_args, model_args, trainer_class = parse_flags(TrainArguments, words)

    class Loop(TrainingLoop):
        def log_rollout(self, rollout: Any, *rest: Any, **options: Any) -> None:
            super().log_rollout(rollout, *rest, **options)
            observer.add_rollout(rollout)

    class Observed(trainer_class):
        loop_class = Loop

    trainer = make_trainer(args, training_args, model_args, Observed)
    probe: Logprobs | None = None
    if trainer.vllm_mode == "colocate":
        record_names(trainer.vllm_generation.llm)
        probe = functools.partial(colocated_logprobs, trainer)
    elif trainer.accelerator.is_main_process:
        probe = functools.partial(served_logprobs, training_args.vllm_server_base_url)
    observer = Observer(trainer, probe)
    trainer.add_callback(observer)
    return trainer, observer


def main() -> None:
    path = Path(sys.argv[1])
    trainer, observer = build(json.loads(path.read_text("utf-8")), path.parent)
    trainer.train()
    seen = {
        "log": trainer.state.log_history, "rollouts": observer.rollouts, "probes": observer.probes,
        "pushed": sorted(FileClient.pushed), "cpu_seconds": time.process_time(),
    }  # fmt: skip
    rank = trainer.accelerator.process_index
    (path.parent / f"rank{rank}.json").write_text(json.dumps(seen), "utf-8")


if __name__ == "__main__":
    main()
