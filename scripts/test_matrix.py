"""Runs the tests in environments of their own: the oldest versions that setup.cfg allows, and the newest.

    python scripts/test_matrix.py                        # both, with the Python that runs this
    python scripts/test_matrix.py oldest --quick         # only the short subset
    python scripts/test_matrix.py newest --python python3.13 --keep /tmp/matrix

oldest   constraints-oldest.txt, the lower end of each range
newest   no constraints: what pip resolves today, pre-releases with --pre

Each environment first runs a short subset of the tests, then every benchmark with --quick, then all tests.
Each command is printed before it runs, with its seconds afterwards. An environment takes 5 to 9 GB with
the CUDA builds of torch that PyPI has; where a CPU build can be had, name its index in
PIP_EXTRA_INDEX_URL. The exit status is that of the first failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Every layer, and the contract with TRL's inner side, in about two minutes.
SUBSET = (
    "tests/test_trl_contract.py",
    "tests/test_public_api.py",
    "tests/core",
    "tests/trainer/test_training_loop.py",
    "tests/trainer/test_variants.py",
    "tests/trainer/setup/test_lora_variants.py",
    "tests/trainer/loop/test_tool_environments.py",
    "tests/trainer/checkpoints/test_save_and_resume.py",
)


def run(words: list[str]) -> int:
    """Run a command in the repository, offline for what asks the Hub; its exit status."""
    print("+", *words, flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    status = subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
    print(f"= exit status {status} after {time.monotonic() - started:.0f} s", flush=True)
    return status


def install(kind: str, folder: Path, options: argparse.Namespace) -> tuple[Path, int]:
    """Make the environment, unless it is there; returns its interpreter and pip's exit status."""
    python = folder / kind / "bin" / "python"
    if python.exists():
        return python, 0
    status = run([options.python, "-m", "venv", str(folder / kind)])
    words = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    if kind == "oldest":
        words += ["-c", "constraints-oldest.txt"]
    if options.pre:
        words.append("--pre")
    # The package along, so that its own ranges count, and by its sources, which scripts import too.
    return python, status or run([*words, "setuptools>=77", "-e", ".[test]"])


def check(python: Path, options: argparse.Namespace) -> int:
    """Show the versions, then run the subset and, unless it is all that is wanted, the rest."""
    status = run([str(python), "-m", "pip", "list"])
    tests = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(options.jobs)]
    tests += ["--dist", "loadfile"]
    status = status or run([*tests, *SUBSET])
    if options.quick:
        return status
    for path in benchmarks():
        status = status or run([str(python), path, "--quick"])
    return status or run(tests)


def benchmarks() -> list[str]:
    """Return the benchmarks that have --quick."""
    paths = sorted((ROOT / "benchmarks").glob("*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if '"--quick"' in path.read_text()]


def main() -> int:
    """Go through the environments that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="oldest|newest", help="default: both")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("--keep", type=Path, help="folder in which the environments stay")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the tests")
    parser.add_argument("--quick", action="store_true", help="only the short subset")
    parser.add_argument("--pre", action="store_true", help="newest may be a pre-release")
    options = parser.parse_args()
    kinds = options.kinds or ["oldest", "newest"]
    if unknown := sorted(set(kinds) - {"oldest", "newest"}):
        parser.error(f"{unknown[0]!r}: allowed are oldest and newest.")
    with tempfile.TemporaryDirectory() as temporary:
        for kind in kinds:
            python, status = install(kind, options.keep or Path(temporary), options)
            status = status or check(python, options)
            print(f"{kind}: {'passed' if status == 0 else f'exit status {status}'}", flush=True)
            if status:
                return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
