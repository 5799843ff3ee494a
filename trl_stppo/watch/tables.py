"""The final figures of runs, as a table and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from .curves import DIAGNOSTICS, measured, points
from .figures import NOTHING
from .runs import Run

Groups = Mapping[str, Sequence[Run]]


def final_figures(groups: Groups, metrics: Sequence[str], last: int) -> list[list[str]]:
    """One row per group: label, runs, steps, and of each metric the mean over its last values.

    Of evaluations the last one alone counts. Several runs are averaged, with the lowest and the highest
    of them behind; and where a run has fewer values, so many.
    """
    rows = []
    for label, runs in groups.items():
        steps = [max((int(e["step"]) for e in run.history), default=0) for run in runs]
        row = [label, str(len(runs)), _range([float(step) for step in steps], ".0f")]
        for metric in metrics:
            wanted = 1 if metric.startswith("eval_") else last  # each over many episodes
            parts = [points(run.history, metric)[1][-wanted:] for run in runs]
            measured_in = [values for values in parts if values]
            finals = [sum(values) / len(values) for values in measured_in]
            fewest = min(map(len, measured_in), default=wanted)
            row.append(_range(finals, ".3g") + (f", of {fewest}" if fewest < wanted else ""))
        rows.append(row)
    return rows


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return NOTHING
    mean, low, high = sum(values) / len(values), min(values), max(values)
    text = format(mean, form)
    return text if low == high else f"{text} ({low:{form}} to {high:{form}})"


def headings(metrics: Sequence[str]) -> list[str]:
    """Of the columns of `final_figures`."""
    titles = {diagnostic.metric: diagnostic.title for diagnostic in DIAGNOSTICS}
    titles |= {d.held_out: f"held-out {d.title.split()[0]}" for d in DIAGNOSTICS if d.held_out}
    return ["", "runs", "steps", *(titles.get(name, name) for name in metrics)]


def print_table(groups: Groups, metrics: Sequence[str], last: int) -> None:
    """On the terminal; figures downwards, since there are more of them than of groups."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [headings(metrics), *final_figures(groups, metrics, last)]
    table = Table(title=f"Mean of the last {last} values", title_justify="left")
    table.add_column("")
    for column in columns[1:]:
        table.add_column(Text(column[0]), justify="right", overflow="fold")
    for lines in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(Text, lines))
    Console().print(table)


def markdown(groups: Groups, metrics: Sequence[str], last: int) -> str:
    """The same table for a document."""
    columns = [headings(metrics), *final_figures(groups, metrics, last)]
    rows = [[_cell(column[i]) for column in columns] for i in range(len(columns[0]))]
    rows[0][0] = f"mean of the last {last} values"
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_csv(groups: Groups, metrics: Sequence[str] | None, path: Path) -> Path:
    """All values, one per line: group, run, seed, step, metric, value.

    Args:
        groups: runs by label.
        metrics: None for every figure that was measured.
        path: of the file.
    """
    histories = {label: [run.history for run in runs] for label, runs in groups.items()}
    names = sorted(measured(histories)) if metrics is None else list(metrics)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["group", "run", "seed", "step", "metric", "value"])
        for label, runs in groups.items():
            for run in runs:
                for name in names:
                    for step, value in zip(*points(run.history, name), strict=True):
                        seed = run.settings.get("seed", "")
                        writer.writerow([label, run.folder, seed, int(step), name, value])
    return path
