"""Runs a study, a grid of tasks, arms, settings and seeds, and reports on its records.

    python benchmarks/studies/study.py start              # runs the cells without a record, then reports
    python benchmarks/studies/study.py start --dry        # lists them
    python benchmarks/studies/study.py start --report --figure start.png
    python benchmarks/studies/study.py --quick            # under a minute, to see that it runs

A study is a file such as `start.toml`; README.md describes it. A run may be killed and started again: a
finished cell is not run again, another begins anew. Tables are Markdown; the last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

# For _outcome.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from _outcome import finish
from _plan import HERE, Study, numbers, read
from _records import FOLDER, Record, Records
from _report import lines, markdown
from _runner import Options, prepare, run_all


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", nargs="?", default="start", help="its name, or a file")
    parser.add_argument("--workers", type=int, default=1, help="cells that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell starts after it")
    parser.add_argument("--dry", action="store_true", help="only list the cells")
    parser.add_argument("--prepare", action="store_true", help="only make agents and games")
    parser.add_argument("--report", action="store_true", help="only report")
    for name in ("tasks", "arms", "settings", "seeds"):
        parser.add_argument(f"--{name}", nargs="+", help="only these")
    parser.add_argument("--base", help="arm with which others are compared; default: the study's")
    parser.add_argument("--beside", nargs="+", default=[], help="studies whose records count, too")
    parser.add_argument("--figure", type=Path, help="draw curves into this file")
    parser.add_argument("--metric", help="of the curves; default: what a task is judged by")
    parser.add_argument("--sweep", type=Path, help="draw final values over learning rates")
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), help="agents and logs")
    parser.add_argument("--records", type=Path, help="a file; default: in records/, by the name")
    parser.add_argument("--quick", action="store_true", help="two cells of two short rollouts")
    return parser.parse_args()


def records_of(name: str) -> Path:
    """Return the file with the records of a study."""
    return FOLDER / f"{Path(name).stem}.jsonl.gz"


def study_of(name: str) -> Study:
    """Read a study by its name or file; one that is gone has records alone."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    if not path.is_file() and not records_of(name).is_file():
        known = sorted({p.name.split(".")[0] for p in (*HERE.glob("*.toml"), *FOLDER.glob("*"))})
        raise SystemExit(f"study {name!r}: allowed are {', '.join(known)}, or a file.")
    return read(path) if path.is_file() else Study(name)


def chosen(args: argparse.Namespace, row: Any) -> bool:
    """Whether the flags leave a cell or a record in, which have the same names."""
    kept = [getattr(args, f"{name}s") for name in ("task", "arm", "setting")]
    values = [row[name] for name in ("task", "arm", "setting")]
    seeds = None if args.seeds is None else set(numbers(args.seeds))
    named = all(names is None or value in names for names, value in zip(kept, values, strict=True))
    return named and (seeds is None or row["seed"] in seeds)


def worked(args: argparse.Namespace, study: Study, records: Records) -> dict[str, Any]:
    """Run, list or prepare the cells."""
    wanted = tuple(cell for cell in study.cells if chosen(args, vars(cell)))
    if args.quick:
        wanted = wanted[:2]
    todo = records.missing(wanted)
    options = Options(args.output, args.workers, args.minutes, small=args.quick)
    if args.dry:
        for cell in todo:
            print(*cell.key)
        return {"ran": 0, "left": len(todo), "failed": []}
    if args.prepare:
        return prepare(study, wanted, options)
    with records.writing():
        return run_all(study, records.missing(wanted), records, options)


def main() -> None:
    """Run what is asked for, then print tables and the line of JSON."""
    args = arguments()
    study = study_of(args.study)
    with tempfile.TemporaryDirectory() as scratch:
        if args.quick:
            args.output, args.workers = Path(scratch), 2
            args.records = Path(scratch) / "records.jsonl.gz"
        records = Records(args.records or records_of(args.study))
        outcome: dict[str, Any] = {"study": study.name, "quick": args.quick}
        if not args.report:
            outcome |= worked(args, study, records)
    rows: list[Record] = [*records.rows]
    for name in args.beside:
        rows += Records(records_of(name)).rows
    rows = [{**row, "study": study.name} if args.beside else row for row in rows if chosen(args, row)]
    order = {arm: number for number, arm in enumerate(dict.fromkeys(c.arm for c in study.cells))}
    rows.sort(key=lambda row: order.get(row["arm"], len(order)))
    base = args.base or study.base
    found = lines(rows, base, study.level, study.height)
    if not args.dry:
        print(markdown(found, base))
    if args.figure or args.sweep:
        # Matplotlib is not for everybody.
        from _figures import draw_curves, draw_sweep

        if args.figure:
            draw_curves(rows, args.figure, args.metric)
        if args.sweep:
            draw_sweep(rows, args.sweep, study.labels, study.height)
    if args.quick:
        outcome["died"] = [{"error": row["error"]} for row in rows if row["error"]]
    finish({**outcome, "records": len(records.rows), "lines": found})


if __name__ == "__main__":
    main()
