"""What `trl-stppo doctor` found, as a table and as a line of JSON; and the arithmetic behind its columns."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.memory import Setup

VERSION = 1
FOUND = "doctor-found "  # before what a measurement tells
# Figure -> heading, and how it is written.
COLUMNS = {
    "what": ("measurement", ""),
    "predicted_gib": ("predicted, GiB", ".2f"),
    "peak_allocated_gib": ("peak, GiB", ".2f"),
    "predicted_off_percent": ("off, %", "+.0f"),
    "peak_reserved_gib": ("reserved, GiB", ".2f"),
    "rollout_tokens_per_second": ("rollout, tokens/s", ",.0f"),
    "update_tokens_per_second": ("update, tokens/s", ",.0f"),
    "matrix_peak_percent": ("of the matrix peak, %", ".1f"),
    "result": ("result", ""),
}
MINIATURE = "**A miniature**: no GPU here, so tiny models ran for a moment. No figure below counts."


def percent_off(predicted: float, measured: float) -> float:
    """How far a prediction is above (or, negative, below) what was measured, in percent of the latter."""
    return 100 * (predicted / measured - 1)


def train_flops(setup: Setup, tokens: int) -> float:
    """Operations that policy and critic need for a token of an update; what is computed again is left out.

    A weight takes two in the forward pass, two for its input's gradient, and two for its own where it is
    trained; attention looks back over half an episode of so many `tokens`, three times (Chowdhery et al.
    2022, arXiv:2204.02311, Appendix B).
    """
    total, critic = 0.0, setup.critic_geometry or setup.geometry
    head = setup.geometry.vocab * setup.geometry.hidden
    for shape, full, more in (
        (setup.geometry, setup.full, head),
        (critic, setup.critic_full, 0),
    ):
        total += (6 if full else 4) * (shape.linear + more)
        total += 3 * 2 * shape.layers * shape.query * tokens
    return total


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a card's or the machine's memory was too small, in whichever library's words."""
    said = f"{type(error).__name__} {error}".lower()
    return bool(re.search(r"out ?of ?memory|memoryerror|alloc_failed", said))


def private(text: str) -> str:
    """A line of an error, without the machine's name and without paths."""
    line = " ".join(text.split()).replace(platform.node() or "\0", "HOST")
    return re.sub(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}", "PATH", line)[:300]


def completed(row: Mapping[str, Any], peak: float | None) -> dict[str, Any]:
    """A row with what follows from its figures; `peak` is the matrices' on this machine, in TFLOP/s."""
    done = dict(row)
    measured = "peak_allocated_gib" in row and not row.get("out_of_memory")
    if "predicted_gib" in row and measured:
        done["predicted_off_percent"] = percent_off(row["predicted_gib"], row["peak_allocated_gib"])
    if peak and "update_tflops" in row:
        done["matrix_peak_percent"] = 100 * row["update_tflops"] / peak
    return done | {"result": result(row)}


def result(row: Mapping[str, Any]) -> str:
    """The last column."""
    for kind in ("failed", "skipped"):
        if kind in row:
            return f"{kind}: {row[kind]}"
    if row.get("out_of_memory"):
        return "out of memory"
    names = [name for name in ("sampler", "generate", "vllm") if f"{name}_tokens_per_second" in row]
    rates = [f"{name} {row[f'{name}_tokens_per_second']:,.0f} tokens/s" for name in names]
    return ", ".join(rates) or "measured"


def markdown(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The machine in lines, the rows in a table."""
    versions, machine = facts["versions"], facts["machine"]
    missing = [name for name, version in versions.items() if version is None]
    listed = {
        "machine": ", ".join(f"{key} {shown(value)}" for key, value in machine.items()),
        "versions": ", ".join(f"{name} {v}" for name, v in versions.items() if v is not None),
        "not installed": ", ".join(missing) or "nothing is missing",
    }
    lines = [MINIATURE, ""] if facts["miniature"] else []
    lines += [f"- {name}: {text}" for name, text in listed.items()]
    headings = [heading for heading, _ in COLUMNS.values()]
    lines += ["", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        cells = [format(row[key], kind) if key in row else "" for key, (_, kind) in COLUMNS.items()]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def shown(value: Any) -> Any:
    """Numbers with four digits that count."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def json_line(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Everything, to be sent back."""
    short = [{key: shown(value) for key, value in row.items()} for row in rows]
    machine = {key: shown(value) for key, value in facts["machine"].items()}
    found = {"trl_stppo_doctor": VERSION, **facts, "machine": machine, "rows": short}
    return json.dumps(found)
