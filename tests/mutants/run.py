"""Breaks the package on purpose, one way at a time, and sees whether the tests notice.

    python tests/mutants/run.py [--only NAME ...] [--jobs 2]

`mutants.toml` beside this file lists what to break and which test files must fail then. The checkout is
not touched: package and tests are copied, and the tests are run unbroken first. Ends with a line of
JSON, and with 0 only if every mutant was killed.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("trl_stppo", "tests", "scripts", "setup.cfg", "pyproject.toml")
LIMIT_SECONDS = 600
OUTCOMES = {0: "SURVIVED", 1: "killed"}


def mutants() -> list[dict[str, Any]]:
    """The entries of the list: name, file, old, new, breaks, tests."""
    return tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]


def copied(folder: Path) -> Path:
    """Package and tests, in a folder of their own."""
    folder.mkdir()
    for source in (ROOT / name for name in COPIED):
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / source.name)
    return folder


def pytest(files: list[str], checkout: Path, limit: int = LIMIT_SECONDS) -> tuple[int | None, str]:
    """Exit code, None where it took too long, and the end of what was printed."""
    # Without bytecode: two versions of a file within a second would look the same to its cache.
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    # With the long tests, which the default leaves out.
    command += ["-m", "not slow and not gpu"]
    try:
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, f"more than {limit} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-4:])


def outcome(mutant: dict[str, Any], checkout: Path) -> tuple[str, str]:
    """What the tests say to one mutant, and the last words about it."""
    path = checkout / mutant["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(mutant["old"]) != 1:
        return "text not found", f"{text.count(mutant['old'])} times in {mutant['file']}"
    path.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    try:
        code, said = pytest(mutant["tests"], checkout)
    finally:
        path.write_text(text, encoding="utf-8")
    return OUTCOMES.get(code if code is not None else -1, "BROKEN"), said


def main() -> int:
    """Run the list; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names contain one")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    options = parser.parse_args()
    wanted = options.only or [""]
    chosen = [m for m in mutants() if any(word in m["name"] for word in wanted)]
    began, found = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        jobs = range(max(1, options.jobs))
        free: SimpleQueue[Path] = SimpleQueue()
        for number in jobs:
            free.put(copied(Path(scratch, str(number))))
        files = sorted({file for mutant in chosen for file in mutant["tests"]})
        parts = [part for part in (files[number :: len(jobs)] for number in jobs) if part]

        def lent(act: Any, what: Any) -> tuple[Any, str]:
            checkout = free.get()
            try:
                return act(what, checkout)
            finally:
                free.put(checkout)

        with ThreadPoolExecutor(len(jobs)) as pool:
            unbroken = functools.partial(pytest, limit=6 * LIMIT_SECONDS)
            for code, said in pool.map(lambda part: lent(unbroken, part), parts):
                if code != 0:
                    print(f"The tests fail without any mutant:\n{said}")
                    return 2
            results = pool.map(lambda mutant: lent(outcome, mutant), chosen)
            for mutant, (verdict, said) in zip(chosen, results, strict=True):
                found[verdict] += 1
                print(f"{verdict:14} {mutant['name']}: {mutant['breaks']}", flush=True)
                if verdict != "killed":
                    print(f"  {mutant['file']}, {', '.join(mutant['tests'])}\n{said}", flush=True)
    print(json.dumps({"mutants": len(chosen), **found, "seconds": round(time.monotonic() - began)}))
    return int(found["killed"] != len(chosen) or not chosen)


if __name__ == "__main__":
    sys.exit(main())
