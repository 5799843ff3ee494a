"""The table of `docs/single_gpu.md`: the longest episode that fits, by model, method and card.

    python benchmarks/memory_table.py

Computed by `trl_stppo.models.memory`, not measured.
"""

from __future__ import annotations

from typing import Any

from trl_stppo.hub import markdown
from trl_stppo.models.geometry import QWEN25, Geometry
from trl_stppo.models.memory import FITS, GIB, estimate, make_setup

CARDS = (16, 24, 48, 80)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
METHODS = {"qlora": "QLoRA", "lora": "LoRA", "full": "full"}
# One episode per micro-batch, eight in flight, rank 16, the clipping bias measured.
SETTINGS: dict[str, Any] = {"rows": 1, "slots": 8, "bias_buffers": 1}
OPTIMIZERS = {"qlora": "paged_adamw_8bit", "lora": "paged_adamw_8bit", "full": "adamw_8bit"}


def longest(geometry: Geometry, method: str, card: float) -> int:
    """The longest of `LENGTHS` whose peak a card of so many GiB holds; 0 for none."""
    return max((n for n in LENGTHS if peak(geometry, method, n) <= FITS * card * GIB), default=0)


def peak(geometry: Geometry, method: str, length: int) -> int:
    """Bytes at the peak."""
    optim = OPTIMIZERS[method]
    return estimate(make_setup(geometry, method, completion=length, optim=optim, **SETTINGS)).peak


def table() -> list[str]:
    """The lines of the Markdown table."""
    head = ["Qwen2.5", "method", "at 4096 tokens", *[f"{card} GB" for card in CARDS]]
    rows = []
    for size, geometry in QWEN25.items():
        for method, name in METHODS.items():
            needed = f"{peak(geometry, method, 4096) / GIB:.1f} GiB"
            cells = [f"{longest(geometry, method, card) or '-'}" for card in CARDS]
            rows.append([size, name, needed, *cells])
    return markdown.table(head, rows).splitlines()


if __name__ == "__main__":
    print("\n".join(table()))
