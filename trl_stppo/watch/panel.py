"""The panel of the live view: figures as rich draws them, for terminals of any width."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .figures import NOTHING, ROLLING, SCORE, SUCCESS, Figures, Progress, duration, shown, sparkline

# Label, metric, format; in reading order.
CELLS = (
    ("clip fraction", "policy/clip_fraction", ".3f"),
    ("KL", "policy/approx_kl", ".4f"),
    ("entropy", "policy/entropy", ".3f"),
    ("ratio max", "policy/ratio_max", ".2f"),
    ("‖g‖", "clip_bias/grad_norm", ".3g"),
    ("‖C‖", "clip_bias/norm", ".3g"),
    ("cos(g, C)", "clip_bias/cosine", ".3f"),
    ("scale", "clip_bias/scale", ".3f"),
    ("expl. variance", "value/explained_variance", ".3f"),
    ("turns", "turns/mean", ".2f"),
    ("valid actions", "turns/valid_action_rate", ".2f"),
    ("memory", "perf/peak_memory_gb", ".2f"),
)
UNITS = {"perf/peak_memory_gb": " GB"}
# Of the time split: name, colour, and a character that tells the parts apart without colours.
PARTS = (
    ("generation", "blue", "█"),
    ("environments", "yellow", "▓"),
    ("scoring", "magenta", "▒"),
    ("update", "green", "░"),
)
ROLLOUT, UPDATE = ("rollout", "blue", "█"), PARTS[-1]
# Guard of a limit -> the metric that is to stay above it.
LIMITS = {"min_valid_action_rate": "turns/valid_action_rate", "min_reward_std": "reward_std"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]+")
LABEL = "cyan"


def one_line(text: str, length: int) -> str:
    """A text without line breaks and control characters, shortened to so many characters.

    The beginning and the end stay: an episode says at its end how it went.
    """
    most = 8 * max(1, length)  # of an episode of a megabyte nobody has to look at more
    if len(text) > 2 * most:
        text = f"{text[:most]} … {text[-most:]}"
    plain = " ".join(_CONTROL.sub(" ", text).split())
    if len(plain) <= length:
        return plain
    head = max(0, (length - 3) * 2 // 3)
    tail = max(0, length - 3 - head)
    return f"{plain[:head]} … {plain[len(plain) - tail :] if tail else ''}"


class LivePanel:
    """Renders what a run has logged so far.

    Args:
        figures: newest metrics.
        progress: where the run is.
        limits: of guards, by field.

    Attributes:
        title: of the run.
        episode: the newest episode as text, None before there is one.
        warning: the newest warning, None without.
    """

    def __init__(
        self, figures: Figures, progress: Progress, limits: dict[str, float | None]
    ) -> None:
        self._figures, self._progress, self._limits = figures, progress, limits
        self.title = ""
        self.episode: str | None = None
        self.warning: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        inner = max(10, width - 4)
        rows = [
            self._success(inner),
            self._score(inner),
            Text(),
            self._grid(inner),
            *self._time(inner),
            *self._episode(inner),
            *self._guards(inner),
        ]
        # One that is too high for the terminal would leave its upper part behind with each redraw.
        while len(rows) > 1 and self._height(console, options, rows, inner) > options.size.height:
            rows.pop(self._least(rows))
        table = Table.grid(padding=0)
        table.add_column(width=inner)
        for row in rows:
            table.add_row(row)
        yield Panel(
            table,
            title=self._heading(width),
            title_align="left",
            subtitle=self._clock(width),
            subtitle_align="right",
            width=width,
        )

    @staticmethod
    def _least(rows: Sequence[RenderableType]) -> int:
        """Which row to leave out first: an empty one, otherwise the last."""
        empty = [i for i, row in enumerate(rows) if isinstance(row, Text) and not row.plain]
        return empty[-1] if empty else len(rows) - 1

    @staticmethod
    def _height(
        console: Console, options: ConsoleOptions, rows: Sequence[RenderableType], inner: int
    ) -> int:
        inside = options.update(width=inner, height=None)
        return 3 + sum(len(console.render_lines(row, inside)) for row in rows)

    # ----------------------------------------------------------------- the border

    def _heading(self, width: int) -> Text:
        progress = self._progress
        share = 100 * progress.step / progress.max_steps if progress.max_steps > 0 else 0.0
        heading = Text(f"{one_line(self.title, max(8, width - 36))} ", style="bold")
        total = progress.max_steps if progress.max_steps > 0 else "?"
        heading.append(f"· step {progress.step}/{total}, {share:.0f} %")
        return heading

    def _clock(self, width: int) -> Text:
        progress = self._progress
        text = Text(f"{duration(progress.gone)} gone, {duration(progress.left())} left")
        if width >= 56:
            text = Text(f"{progress.phase} {duration(progress.phase_seconds)} · ") + text
        return text

    # ------------------------------------------------------------------- the rows

    def _success(self, inner: int) -> Text:
        """The watched figure, its mean over a few rollouts, and its course."""
        figures, name = self._figures, self._figures.watched
        label = "success" if name == SUCCESS else "score"
        form = ".3f" if name == SUCCESS else ".3g"
        line = Text()
        line.append(f"{label} ", style=LABEL)
        line.append(shown(figures.get(name), form), style="bold")
        if len(figures.course) > 1:
            line.append(f"  mean of {min(ROLLING, len(figures.course))} ", style=LABEL)
            line.append(shown(figures.rolling(), form), style="bold")
            low, high = shown(min(figures.course), form), shown(max(figures.course), form)
            room = inner - line.cell_len - len(low) - len(high) - 5
            if room >= 5:
                line.append(f"  {low} ", style="dim")
                line.append(sparkline(list(figures.course), min(room, 60)), style="green")
                line.append(f" {high}", style="dim")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _score(self, inner: int) -> Text:
        """Score, held-out success, and tokens per second."""
        figures = self._figures
        parts = []
        if figures.watched == SUCCESS:
            parts.append(("score", shown(figures.get(SCORE), ".3g"), ""))
        if figures.held_out is not None:
            held_out, step = figures.held_out
            parts.append(("held-out", shown(held_out), f" (step {step})"))
        rates = [
            shown(figures.get(f"perf/{name}_tokens_per_second"), ",.0f")
            for name in ("rollout", "update")
        ]
        parts.append(("tokens/s", f"{rates[0]} / {rates[1]}", " played / trained"))
        line = Text(no_wrap=True, overflow="ellipsis")
        room = inner - sum(len(label) + len(value) + 3 for label, value, _ in parts)
        for index, (label, value, after) in enumerate(parts):
            line.append("  " if index else "").append(f"{label} ", style=LABEL).append(value)
            if len(after) <= room:
                line.append(after, style="dim")
                room -= len(after)
        return line

    def _grid(self, inner: int) -> Table:
        """The figures of `CELLS` in as many columns as fit."""
        columns = 4 if inner >= 96 else 3 if inner >= 70 else 2 if inner >= 44 else 1
        rows = -(-len(CELLS) // columns)
        table = Table.grid(padding=(0, 1), expand=True)
        for _ in range(columns):
            table.add_column(style=LABEL, no_wrap=True)
            table.add_column(justify="right", no_wrap=True)
            table.add_column(width=1)
        for row in range(rows):
            line: list[RenderableType] = []
            for label, name, form in CELLS[row::rows]:
                value = self._figures.get(name)
                text = shown(value, form) + (UNITS.get(name, "") if value is not None else "")
                line += [label, Text(text, style=self._style(name, value)), ""]
            table.add_row(*line)
        return table

    def _style(self, name: str, value: float | None) -> str:
        if value is None:
            return "dim"
        missed = name == "value/explained_variance" and value < 0
        return "bold yellow" if missed or name in self._below() else "bold"

    def _below(self) -> dict[str, tuple[str, float]]:
        """Metrics that are below the limit of a guard: its field and value."""
        found = {}
        for field, name in LIMITS.items():
            limit, value = self._limits.get(field), self._figures.get(name)
            if limit is not None and value is not None and value < limit:
                found[name] = field, limit
        return found

    def _time(self, inner: int) -> list[Text]:
        """How the last round's time was spent, as a bar and in words."""
        shares = self._progress.shares(self._figures.get)
        if shares is None or sum(shares) <= 0:
            return []
        parts = list(zip(PARTS, shares, strict=True))
        if shares.generation + shares.environments <= 0.01 * sum(shares[:3]):  # nobody told
            parts = [(ROLLOUT, sum(shares[:3])), (UPDATE, shares.update)]
        total, so_far, drawn = sum(shares), 0.0, 0
        bar, words = Text("time ", style=LABEL), [Text("     ")]
        cells = max(10, min(60, inner - 5))
        for (name, colour, character), seconds in parts:
            so_far += seconds
            until = round(so_far / total * cells)
            bar.append(character * (until - drawn), style=colour)
            drawn = until
            word = Text.assemble(
                (f"{character} ", colour), f"{name} {100 * seconds / total:.0f} %  "
            )
            if words[-1].cell_len + word.cell_len - 2 > inner:
                words.append(Text("     "))
            words[-1].append(word)
        for line in words:
            line.rstrip()
        return [Text(), bar, *words]

    def _episode(self, inner: int) -> list[Text]:
        if self.episode is None:
            return []
        line = Text("newest episode ", style=LABEL)
        line.append(one_line(self.episode, 2 * inner - line.cell_len - 14), style="default")
        return [Text(), line]

    def _guards(self, inner: int) -> list[Text]:
        """What the guards have to say, nothing where all is well."""
        lines = []
        for name, what in (
            ("guard/skipped_steps", "optimizer steps skipped as not finite"),
            ("guard/empty_steps", "optimizer steps skipped, no episode to learn from"),
            ("guard/kl_stopped_steps", "optimizer steps left out beyond target_kl"),
        ):
            if count := self._figures.get(name):
                lines.append(f"{count:.0f} {what}")
        for name, (field, limit) in self._below().items():
            lines.append(f"{name} is below {field}={limit:g}")
        if self.warning is not None:
            lines.append(one_line(self.warning, 2 * inner - 6))
        return [Text(f"! {line}", style="yellow") for line in lines]


__all__ = ["CELLS", "NOTHING", "LivePanel", "one_line"]
