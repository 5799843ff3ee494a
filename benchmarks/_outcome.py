"""End of every benchmark: tables, one line of JSON, and a status that says whether all was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table. Its first column has names, the others have figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def finish(figures: dict[str, Any]) -> None:
    """Print the figures; the exit status is 1 if any of them is an `error`.

    What could be measured is printed in every case.
    """
    print(json.dumps(figures), flush=True)
    if failures := list(errors(figures)):
        sys.exit(f"{len(failures)} failed; the first: {failures[0]}")


def errors(value: Any) -> list[str]:
    """Return the texts under `error`, at any depth."""
    if isinstance(value, list):
        return [error for one in value for error in errors(one)]
    if not isinstance(value, dict):
        return []
    nested = errors(list(value.values()))
    return [str(value["error"]), *nested] if value.get("error") else nested
