"""The table of `docs/one_gpu.md`: the longest episode that fits, by model, method and card.

    python benchmarks/memory_table.py

Computed by `trl_stppo.models.memory`, not measured.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from peft import LoraConfig

from trl_stppo.hub import markdown
from trl_stppo.models.critic import Critic, SeparateCritic, SharedCritic
from trl_stppo.models.memory import FITS, GIB, Setup, estimate
from trl_stppo.models.shapes import QWEN25, critic_shape, policy_shape, qwen25, read_setup

CARDS = (16, 24, 48, 80)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
METHODS = {"qlora": "QLoRA", "lora": "LoRA", "full": "full"}
OPTIMIZERS = {"qlora": "paged_adamw_8bit", "lora": "paged_adamw_8bit", "full": "adamw_8bit"}


@functools.cache
def setup(size: str, method: str) -> Setup:
    """One episode per micro-batch, eight in flight, rank 16, the clipping bias measured."""
    if method == "full":
        policy = policy_shape(qwen25(size), "float32")
        critic: Critic = SeparateCritic(critic_shape(qwen25(size), "float32"))
    else:
        adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        policy = policy_shape(qwen25(size), "bfloat16", adapters, four_bit=method == "qlora")
        critic = SharedCritic(policy)
    settings = {"rows": 1, "slots": 8, "bias_buffers": 1, "compute_bytes": 2}
    return read_setup(policy, critic, optim=OPTIMIZERS[method], **settings)


def longest(size: str, method: str, card: float) -> int:
    """The longest of `LENGTHS` whose peak a card of so many GiB holds; 0 for none."""
    return max((n for n in LENGTHS if peak(size, method, n) <= FITS * card * GIB), default=0)


def peak(size: str, method: str, length: int) -> int:
    """Bytes at the peak."""
    return estimate(replace(setup(size, method), completion=length)).peak


def table() -> list[str]:
    """The lines of the Markdown table."""
    head = ["Qwen2.5", "method", "at 4096 tokens", *[f"{card} GB" for card in CARDS]]
    rows = []
    for size in QWEN25:
        for method, name in METHODS.items():
            needed = f"{peak(size, method, 4096) / GIB:.1f} GiB"
            cells = [f"{longest(size, method, card) or '-'}" for card in CARDS]
            if set(cells) != {"-"}:  # no row for what fits on none of them
                rows.append([size, name, needed, *cells])
    return markdown.table(head, rows).splitlines()


if __name__ == "__main__":
    print("\n".join(table()))
