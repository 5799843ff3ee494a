"""Worker of `update.py`: twice the rows in one pass against two passes of the rows, in turn.

What a shared pass of policy and critic over one backbone would bring at best: both see the same
tokens, so twice the rows through a LoRA backbone stand for the two.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from _update_probe import Gauge, Probe, read_job, send
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def build(job: dict[str, Any]) -> Any:
    """The backbone under adapters, in training mode."""
    kwargs: dict[str, Any] = {"dtype": job["dtype"]}
    if job["tuning"] == "qlora":
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=getattr(torch, job["dtype"]),
        )
    model = AutoModelForCausalLM.from_pretrained(job["model"], **kwargs)
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type=TaskType.CAUSAL_LM
    )
    peft_model = get_peft_model(model, config)
    if job["tuning"] != "qlora":
        peft_model.to(job["device"])
    return peft_model.train()


def matrix_peak(device: str) -> float | None:
    """TFLOP/s of a large bf16 product; None on the CPU, where bf16 is no yardstick."""
    if device != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(30):
        if repeat == 10:
            start.record()
        a @ a
    end.record()
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (start.elapsed_time(end) / 1e3) / 1e12


def main() -> None:
    """Run the job given on the command line, and send what was measured."""
    job = read_job()
    transformers.logging.set_verbosity_error()
    gauge, clock = Gauge(job["device"]), Probe(job).clock
    model = build(job)
    backbone = model.get_base_model().model
    ids = torch.randint(32, 300, (2 * job["micro"], job["longest"]), device=job["device"])

    def run(rows: list[torch.Tensor]) -> tuple[float, float]:
        model.zero_grad()
        gauge.reset()
        started = clock()
        for part in rows:
            backbone(input_ids=part, use_cache=False).last_hidden_state.float().sum().backward()
        return clock() - started, gauge.peak()

    run(list(ids[:2].chunk(2)))  # warm up
    one, two = [], []
    for _ in range(job["updates"]):
        one.append(run([ids]))
        two.append(run(list(ids.chunk(2))))
    result = {}
    for name, runs in (("one", one), ("two", two)):
        result[f"{name}_seconds"] = statistics.median(seconds for seconds, _ in runs)
        result[f"{name}_mb"] = max(mb for _, mb in runs)
    result["time_ratio"] = statistics.median(b[0] / a[0] for a, b in zip(one, two, strict=True))
    send({"done": {**result, "matrix_tflops": matrix_peak(job["device"])}})


if __name__ == "__main__":
    main()
