"""Tables of `trl-stppo train`: before and after the training, and what would run."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..redaction import redacted
from ..watch.figures import SCORE, SUCCESS


def comparison_table(before: dict[str, float], after: dict[str, float]) -> None:
    """Held-out success before and after, with 95 % intervals."""
    table = Table(title=f"Held-out rows, {after['eval_episodes']} episodes")
    success = f"eval_{SUCCESS}" in after
    for column in (
        "",
        "success" if success else "score",
        "95 % interval",
        "turns",
        "valid actions",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, metrics in (("before", before), ("after", after)):
        # Reward functions alone say nothing about success.
        shown = SUCCESS if f"eval_{SUCCESS}" in metrics else SCORE
        rate, low, high = (
            metrics.get(f"eval_{shown}{bound}", float("nan")) for bound in ("", "_low", "_high")
        )
        table.add_row(
            name,
            f"{rate:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{metrics['eval_turns/mean']:.2f}",
            f"{metrics.get('eval_turns/valid_action_rate', float('nan')):.3f}",
        )
    Console().print(table)


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
