"""One run of `benchmarks/memory.py`, in a process of its own: train, and watch the memory."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from geometries import GEOMETRIES
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, logging

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.models.memory import estimate
from trl_stppo.models.memory_of_runs import settings_of
from trl_stppo.models.shapes import read_setup

PROMPT, TURNS = 16, 4


class NoteEnv:
    """A text environment that answers every turn with a note, until the token budget ends it."""

    def __init__(self, words: int) -> None:
        self._words = words

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start."""
        return "one two", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer; every turn earns its length."""
        return "three four " * (self._words // 2), len(action) / 100, False, False, {}


def episodes(prompts: list[Any], vocabulary: int, length: int) -> dict[str, Any]:
    """Fixed random episodes of the full length: four turns, an observation behind each but the last."""
    draw, completion = random.Random(0), length - PROMPT
    turn = completion // (2 * TURNS - 1)
    spans = [(2 * i * turn, (2 * i + 1) * turn) for i in range(TURNS - 1)]
    spans.append((2 * (TURNS - 1) * turn, completion))

    def tokens(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(count)]

    return {
        "prompt_ids": [tokens(PROMPT) for _ in prompts],
        "completion_ids": [tokens(completion) for _ in prompts],
        "logprobs": None,
        "turn_spans": [spans for _ in prompts],
        "turn_rewards": [[draw.random() for _ in spans] for _ in prompts],
    }


def arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that are STPPOConfig's."""
    return {
        "output_dir": spec["output_dir"],
        "variant": spec["variant"],
        "per_device_train_batch_size": spec["rows"],
        "gradient_accumulation_steps": spec["accumulation"],
        "num_mini_batches": 1,
        "num_ppo_epochs": spec["epochs"],
        "max_steps": spec["epochs"] * spec["rollouts"],
        "max_completion_length": spec["length"] - PROMPT,
        "gradient_checkpointing": spec["checkpointing"],
        "kl_coef": spec["kl_coef"],
        "optim": spec["optim"],
        "bf16": spec["autocast"] or spec["dtype"] == "bfloat16",
        "model_init_kwargs": {"dtype": spec["dtype"]},
        # Tokens are clipped from the second epoch on, which is what costs a second backward pass.
        "cliprange": 1e-6,
        "learning_rate": 1e-4,
        "use_cpu": spec["device"] == "cpu",
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def lora(task: str) -> LoraConfig:
    """Adapters on all linear layers, as QLoRA has them."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)


def critic_model(spec: dict[str, Any]) -> Any:
    """The separate critic that the setting asks for."""
    if "separate" not in spec["setting"]:
        return None
    dtype = getattr(torch, spec["dtype"])
    model = AutoModelForSequenceClassification.from_pretrained(
        spec["folder"], num_labels=1, dtype=dtype
    )
    if spec["setting"].endswith("lora"):
        model = get_peft_model(model, lora("SEQ_CLS"))
    return model


def make_trainer(spec: dict[str, Any]) -> STPPOTrainer:
    """The trainer of one setting, made the way a user makes it."""
    adapted, four_bit = "lora" in spec["setting"], "qlora" in spec["setting"]
    dtype = getattr(torch, spec["dtype"])
    config, more = arguments(spec), {}
    if spec["generate"]:
        turn = spec["turn_tokens"]
        config.update(max_turn_tokens=turn, generation_slots=spec["slots"])
        more["environment_factory"] = lambda: NoteEnv(min(200, turn))
    else:
        vocabulary = GEOMETRIES[spec["model"]]["vocab_size"]
        more["rollout_func"] = lambda prompts, _: episodes(prompts, vocabulary, spec["length"])
    rows = [[{"role": "user", "content": "one two three"}]] * (spec["rows"] * spec["accumulation"])
    return STPPOTrainer(
        model=spec["folder"],
        args=STPPOConfig(**config),
        reward_funcs=[],
        train_dataset=Dataset.from_dict({"prompt": rows}),
        peft_config=lora("CAUSAL_LM") if adapted else None,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        if four_bit
        else None,
        value_model=critic_model(spec),
        **more,
    )


def leave_file(model: torch.nn.Module) -> None:
    """Copy weights that are mapped from their file, as a card would hold them.

    The kernel reads such pages when they are touched and drops them when it likes, so that a peak
    would count some of them, some of the time.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()


class Meter:
    """Peak memory in bytes since it was made, and since `restart`."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        gc.collect()
        self._baseline = 0 if self._cuda else self._status("VmRSS")
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Bytes above the baseline."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return self._status("VmHWM") - self._baseline

    def now(self) -> int:
        """Bytes above the baseline that are in use."""
        return (
            torch.cuda.memory_allocated() if self._cuda else self._status("VmRSS") - self._baseline
        )

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def run_subject(spec: dict[str, Any]) -> dict[str, Any]:
    """Train one setting in this process."""
    logging.set_verbosity_error()
    torch.ones(8, 8) @ torch.ones(8, 8)
    meter = Meter(spec["device"])
    trainer = make_trainer(spec)
    figures: dict[str, Any] = {"build_peak": meter.peak()}
    if spec["device"] == "cpu":
        leave_file(trainer.model)
        if not trainer.uses_shared_critic:
            leave_file(trainer.critic.model)
    gc.collect()
    figures["built"] = meter.now()
    models = (trainer.model, trainer.critic, trainer.ref_model)
    expected = estimate(read_setup(*models, **settings_of(trainer.args, PROMPT)))
    meter.restart()
    started = time.perf_counter()
    trainer.train()
    figures["seconds"] = time.perf_counter() - started
    figures["train_peak"] = meter.peak()
    figures["peak"] = max(figures["build_peak"], figures["train_peak"])
    if spec["device"] == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures.update(reserved=torch.cuda.max_memory_reserved(), card_used=total - free)
    figures["estimate"] = expected.peak - expected.overhead
    figures["phase"], figures["phases"] = expected.phase, expected.phases
    newest: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        newest.update(entry)
    for name in (
        "perf/rollout_tokens_per_second",
        "perf/update_tokens_per_second",
        "clip_bias/norm",
    ):
        figures[name] = newest.get(name)
    return figures


if __name__ == "__main__":
    print(json.dumps(run_subject(json.loads(sys.argv[1]))))
