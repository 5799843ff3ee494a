"""The table of a dry run."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..redaction import redacted


def plan_table(rows: list[tuple[str, str, str]], notes: list[str], problems: list[str]) -> None:
    """What a run would be: section, name and value; what is not known; what would stop it."""
    console = Console(highlight=False)
    table = Table(title="What would run", show_header=False)
    before = None
    for section, name, value in rows:
        if before not in (None, section):
            table.add_section()
        table.add_row(
            section if section != before else "", escape(redacted(name)), escape(redacted(value))
        )
        before = section
    if rows:
        console.print(table)
    for note in notes:
        console.print(redacted(f"note: {note}"), markup=False, soft_wrap=True)
    for problem in problems:
        console.print(redacted(f"PROBLEM: {problem}"), markup=False, soft_wrap=True)
    console.print(
        f"{len(problems)} problem(s): this would not start."
        if problems
        else "This would start, as far as can be told without weights and network."
    )
