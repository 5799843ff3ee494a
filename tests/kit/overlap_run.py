"""Runs of `overlapping.py` on two processes. Started by `test_overlap.py`."""

import functools
import threading
from pathlib import Path
from typing import Any

import torch

from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.launch import save_cases
from tests.kit.overlapping import OVERLAP, STALE, end_of, trainer_for
from tests.kit.vllm_server import CompletionsServer, ModelSampler, attach

CALLS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather_object", "reduce",
)  # fmt: skip
_threads: set[str] = set()


def _watched(call: Any) -> Any:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _threads.add(threading.current_thread().name)
        return call(*args, **kwargs)

    return noted


def run(case: str, folder: Path) -> dict[str, Any]:
    """The end of a run, and the threads on which it has talked to the other process."""
    for name in CALLS:
        call = getattr(torch.distributed, name)
        if not hasattr(call, "__wrapped__") or call.__wrapped__.__module__ != __name__:
            setattr(torch.distributed, name, _watched(call))
    _threads.clear()
    way = STALE if case == "stale" else OVERLAP
    sizes = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "max_steps": 8}
    trainer = trainer_for(folder, "full" if case == "server" else "lora", **way, **sizes)
    if case == "server":
        sampler = ModelSampler(tiny_policy(char_tokenizer()), trainer.eos_token_ids)
        attach(trainer, CompletionsServer(sampler) if trainer.accelerator.is_main_process else None)
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    end = end_of(trainer)
    gap = "sampling/sampling_logp_difference/mean"
    gaps = [entry[gap] for entry in trainer.state.log_history if gap in entry]
    log = [*map(dict, end["log"])]
    return {**end, "trace": [], "log": log, "gaps": gaps, "threads": sorted(_threads)}


if __name__ == "__main__":
    save_cases(run)
