"""The tables of `update.py`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

FLOOR = "trl-1.16 grpo lora"


def brief(f: dict[str, Any]) -> str:
    """One line of progress, so that a long run that is cut off has told what it knew."""
    if "error" in f:
        return f"failed: {f['error']}"
    padded = f", {f['padded_seconds']:.2f} s of bare passes" if "padded_seconds" in f else ""
    return f"{f['seconds']:.2f} s, {f['update_mb']:.0f} MB, {f['whole_mb']:.0f} MB in all{padded}"


def show_main(console: Console, results: dict[str, Any], title: str) -> None:
    """Speed and memory of every subject, and its time over that of GRPO."""
    floor = results.get(FLOOR, {}).get("seconds")
    table = Table(title=title, title_justify="left")
    table.add_column("subject")
    for column in (
        "seconds",
        "tokens/s",
        "update MB",
        "whole MB",
        "time : grpo lora",
        "trained",
    ):
        table.add_column(column, justify="right")
    for name, f in results.items():
        if "error" in f:
            table.add_row(name, "failed: " + f["error"][:60])
            continue
        table.add_row(
            name,
            f"{f['seconds']:.2f}",
            f"{f['tokens_per_second']:.0f}",
            f"{f['update_mb']:.0f}",
            f"{f['whole_mb']:.0f}",
            f"{f['seconds'] / floor:.2f}" if floor else "",
            f"{f['trainable'] / 1e6:.2f}M",
        )
    console.print(table)


def show_phases(console: Console, results: dict[str, Any]) -> None:
    """Print the share of each phase in the time of our updates."""
    ours = {name: f for name, f in results.items() if f.get("phases")}
    names = list(dict.fromkeys(phase for f in ours.values() for phase in f["phases"]))
    table = Table(title="share of the update", title_justify="left")
    table.add_column("subject")
    for column in (*names, "rest"):
        table.add_column(column.replace("_", " "), justify="right")
    for name, f in ours.items():
        f["shares"] = {phase: f["phases"].get(phase, 0.0) / f["seconds"] for phase in names}
        f["shares"]["rest"] = 1 - sum(f["shares"].values())
        table.add_row(name, *(f"{share:.1%}" for share in f["shares"].values()))
    if ours:
        console.print(table)


def show_clip(console: Console, result: dict[str, Any], title: str) -> None:
    """Extra time of the correction."""
    table = Table(title=title, title_justify="left")
    for column in ("clipped", "wanted", "logged", "ppo s", "st-ppo s", "extra"):
        table.add_column(column, justify="left" if column == "clipped" else "right")
    for case, f in result.items():
        if case == "error":
            table.add_row("failed: " + str(f)[:60])
            continue
        table.add_row(
            case,
            f"{f['clipped_wanted']:.1%}",
            " / ".join(f"{share:.1%}" for share in f["clipped_logged"]),
            f"{f['ppo']:.2f}",
            f"{f['st-ppo']:.2f}",
            f"{f['extra_percent']:+.1f}%",
        )
    console.print(table)
