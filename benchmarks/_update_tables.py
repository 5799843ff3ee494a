"""The tables of `update.py`."""

from __future__ import annotations

from typing import Any

from _outcome import show

FLOOR = "trl-1.16 grpo lora"


def brief(f: dict[str, Any]) -> str:
    """One line of progress, so that a long run that is cut off has told what it knew."""
    if "error" in f:
        return f"failed: {f['error']}"
    padded = f", {f['padded_seconds']:.2f} s of bare passes" if "padded_seconds" in f else ""
    return f"{f['seconds']:.2f} s, {f['update_mb']:.0f} MB, {f['whole_mb']:.0f} MB in all{padded}"


def show_main(results: dict[str, Any], title: str) -> None:
    """Speed and memory of every subject, and its time over that of GRPO."""
    floor, rows = results.get(FLOOR, {}).get("seconds"), []
    for name, f in results.items():
        if "error" in f:
            rows.append([name, "failed: " + f["error"][:60]])
            continue
        rows.append(
            [
                name,
                f"{f['seconds']:.2f}",
                f"{f['tokens_per_second']:.0f}",
                f"{f['update_mb']:.0f}",
                f"{f['whole_mb']:.0f}",
                f"{f['seconds'] / floor:.2f}" if floor else "",
                f"{f['trainable'] / 1e6:.2f}M",
            ]
        )
    figures = ("seconds", "tokens/s", "update MB", "whole MB", "time : grpo lora", "trained")
    show(title, ("subject", *figures), rows)


def show_phases(results: dict[str, Any]) -> None:
    """Print the share of each phase in the time of our updates."""
    ours = {name: f for name, f in results.items() if f.get("phases")}
    names = list(dict.fromkeys(phase for f in ours.values() for phase in f["phases"]))
    for f in ours.values():
        f["shares"] = {phase: f["phases"].get(phase, 0.0) / f["seconds"] for phase in names}
        f["shares"]["rest"] = 1 - sum(f["shares"].values())
    columns = ["subject", *(name.replace("_", " ") for name in names), "rest"]
    rows = ([n, *(f"{share:.1%}" for share in f["shares"].values())] for n, f in ours.items())
    show("share of the update", columns, rows)


def show_clip(result: dict[str, Any], title: str) -> None:
    """Extra time of the correction."""
    if "error" in result:
        print(f"{title}: failed: {result['error']}")
        return
    rows = (
        [
            case,
            f"{f['clipped_wanted']:.1%}",
            " / ".join(f"{share:.1%}" for share in f["clipped_logged"]),
            f"{f['ppo']:.2f}",
            f"{f['st-ppo']:.2f}",
            f"{f['extra_percent']:+.1f}%",
        ]
        for case, f in result.items()
    )
    show(title, ("clipped", "wanted", "logged", "ppo s", "st-ppo s", "extra"), rows)
