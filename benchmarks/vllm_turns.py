"""Speed of sampling turns: vLLM turn by turn, vLLM in batches, our own cache, continuous batching.

Random weights of 87M parameters, 32 episodes of three turns, prompts and observations of 128 tokens:

    equal     32 tokens a turn; tokens per CPU second
    varied    4 to 100 tokens a turn
    tools     a call of 20 to 200 ms after each turn, by our loop and by TRL's, on the same vLLM; seconds

    python benchmarks/vllm_turns.py            # half an hour on two cores
    python benchmarks/vllm_turns.py --quick    # 8 episodes and 2M parameters

It needs vLLM (`make test-vllm` makes an environment that has it). Each figure comes from a process of its
own, all ways in turn. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _outcome import finish

WAYS = ("engine", "batched", "own")
WORKER = Path(__file__).parent / "_vllm_worker.py"


def measured(*arguments: object) -> dict[str, Any]:
    """One measurement of the worker, or why there is none."""
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def in_turn(name: str, ways: tuple[str, ...], repeats: int, *arguments: object) -> dict[str, Any]:
    """Each way `repeats` times, one after the other; medians of every figure."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            folder, *rest = arguments
            runs[way].append(measured(name, folder, way, *rest))
            print(f"{name} {way:15} {json.dumps(runs[way][-1])}", flush=True)
    result: dict[str, Any] = {}
    for way, figures in runs.items():
        good = [run for run in figures if "error" not in run]
        failed = next((run for run in figures if "error" in run), {})
        result[way] = failed or {k: statistics.median(run[k] for run in good) for k in good[0]}
    return result


def main() -> None:
    """Run the cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, once each")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        finish({"skipped": "vLLM is not installed; `make test-vllm` makes an environment with it"})
        return
    repeats, episodes = (1, 8) if options.quick else (options.repeats, 32)
    figures: dict[str, Any] = {"quick": options.quick, "episodes": episodes}
    with tempfile.TemporaryDirectory() as folder:
        model, small = f"{folder}/model", f"{folder}/small"
        figures["model"] = measured("model", model, *((2, 64) if options.quick else (10, 768)))
        measured("model", small, 2, 64)
        kinds = ("varied",) if options.quick else ("equal", "varied")
        for kind in kinds:
            figures[kind] = in_turn("turns", WAYS, repeats, model, episodes, kind)
        if not options.quick:  # minutes for what others do in seconds
            figures["paged"] = in_turn("turns", ("generate_batch",), 1, model, 4, "equal")
            figures["tools"] = in_turn("tools", ("ours", "trl"), repeats, model, episodes)
        figures["tools_small"] = in_turn("tools", ("ours", "trl"), repeats, small, episodes)
    finish(figures)


if __name__ == "__main__":
    main()
