"""Measure this machine: memory, speed and what is missing.

Trains models of published shapes with random weights for a few steps, each in a process of its own, and
prints a table of peak memory beside what `estimate` expects, and of speeds; the last line is JSON, for
an issue. Nothing is downloaded. Without a GPU only tiny models run. The exit code is 1 where
a measurement failed; one that is skipped, or runs out of memory, says so.

Examples:
    trl-stppo doctor
    trl-stppo doctor --only qlora sampler --budget_minutes 4 --output doctor.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..version import __version__
from .doctor_report import FOUND, completed, json_line, markdown, private
from .doctor_rows import PACKAGES, ROWS, TINY, why_not
from .usage import UsageError

WORKER = "trl_stppo.cli.doctor_worker"
LARGEST_SHARE = 0.4  # of the budget, so that what hangs leaves time for others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--budget_minutes", metavar="N", type=float, default=8, help="Time limit (8).")
    add(
        "--only",
        metavar="NAME",
        nargs="+",
        help=f"Measurements, by name or by its beginning: {', '.join(ROWS)}.",
    )
    add("--output", metavar="FILE", type=Path, help="Also write the table there, as Markdown.")


def run(options: argparse.Namespace) -> int:
    """Measure and report; 1 where something failed."""
    names, output = _chosen(options.only), options.output
    if not 0 < options.budget_minutes < float("inf"):
        raise UsageError(
            f"`--budget_minutes {options.budget_minutes:g}`: must be above 0. The usual is 8."
        )
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"`--output {output}`: there is no folder {output.parent}. Make it first.")
    ends = time.monotonic() + 60 * options.budget_minutes
    machine = measured({"measure": "machine"}, ends) | _driver()
    facts = {
        "miniature": machine.get("devices") == 0,
        "budget_seconds": 60 * options.budget_minutes,
        "machine": machine,
        "versions": {"trl-stppo": __version__, "Python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
    }
    rows = []
    for name in names:
        rows.append(_row(name, facts, ends))
        print(f"{name}: {rows[-1]['result']}", file=sys.stderr, flush=True)
    table = markdown(facts, rows)
    if output is not None:
        output.write_text(table + "\n")
    print(f"{table}\n\n{json_line(facts, rows)}")
    return int(any("failed" in row for row in [machine, *rows]))


def _chosen(only: list[str] | None) -> list[str]:
    """The rows whose names begin like one of these."""
    for word in only or ():
        if not any(name.startswith(word) for name in ROWS):
            raise UsageError(
                f"`--only {word}`: there is no such measurement. Known are {', '.join(ROWS)}."
            )
    return [name for name in ROWS if only is None or name.startswith(tuple(only))]


def _row(name: str, facts: dict[str, Any], ends: float) -> dict[str, Any]:
    """One measurement, or why there is none."""
    spec = {**ROWS[name], "miniature": facts["miniature"]}
    spec |= TINY if facts["miniature"] else {}
    now = time.monotonic()
    reason = why_not(spec, facts, ends - now)
    until = min(ends, now + LARGEST_SHARE * facts["budget_seconds"])
    found = {"skipped": reason} if reason else measured(spec, until)
    model = "tiny" if facts["miniature"] else f"Qwen2.5-{spec['model']}"
    row = {"name": name, "what": f"{name}: {model}, {spec['what']}", "model": model}
    row |= {key: spec[key] for key in ("tokens", "devices") if key in ROWS[name]}
    return completed(row | found, facts["machine"].get("matrix_peak_tflops"))


def measured(spec: dict[str, Any], ends: float) -> dict[str, Any]:
    """What a process of its own finds until its time ends."""
    root = str(Path(__file__).parents[2])  # where Python finds us from another folder
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    told = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": paths}
    if spec["measure"] != "machine" and "devices" not in spec:  # several would share a batch
        told["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command_of(spec),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=folder,
            env={**os.environ, **told},
        )
        try:
            said = process.communicate(timeout=max(1, ends - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            return {"skipped": "its share of the time was used up"}
        finally:
            _end(process)
    lines = said.splitlines()
    for line in reversed(lines):
        if line.startswith(FOUND):
            return dict(json.loads(line.removeprefix(FOUND)))
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return {"failed": private(f"exit code {process.returncode}: {last}")}


def command_of(spec: dict[str, Any]) -> list[str]:
    """The process that measures; several of them where there are to be several GPUs."""
    start = ["-m"]
    if (number := spec.get("devices", 1)) > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}", "-m"]
    return [sys.executable, *start, WORKER, json.dumps(spec)]


def _end(process: subprocess.Popen[str]) -> None:
    """End a process with all that it has started, launched processes in sessions of their own among them."""
    if process.poll() is None:
        import psutil

        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        process.communicate()


def _driver() -> dict[str, str]:
    """The version of NVIDIA's driver, where its tool is there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"driver": said.split()[0]} if said.split() else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
