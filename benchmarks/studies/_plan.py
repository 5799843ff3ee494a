"""A study: a TOML file that names tasks, arms, settings and seeds, and the cells that follow from it."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# A block of the grid may set these.
BLOCK = ("tasks", "arms", "settings", "seeds", "rollouts")
KEYS = (*BLOCK, "base", "level", "height", "curves", "labels", "grid")
Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        overrides: of the task's settings: those of the cell's setting, then those of its arm. `trainer`
            names the class, `episodes` and `mini_batches` describe the rollout batch, all else goes into the
            configuration.
        rollouts: number of rollout batches; None for the task's.
    """

    study: str
    task: str
    arm: str
    setting: str
    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    rollouts: int | None = None

    @property
    def key(self) -> Key:
        """Identity of the run among the records of its study."""
        return self.task, self.arm, self.setting, self.seed


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: that of its file, and of the file with its records.
        base: the arm with which the others are compared.
        level: of the mean of five rollouts; the report counts the rollouts until a run reaches it.
        height: success from which on a drop below the best rollout counts.
        curves: metrics of the trainer's log that the records keep besides the usual ones.
        labels: of arms and tasks in figures.
        cells: in the order in which they run.
        folder: of the file; trainers of its arms may be defined in modules there.
    """

    name: str
    base: str | None = None
    level: float | None = None
    height: float = 0.0
    curves: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    folder: Path = HERE


def read(path: Path) -> Study:
    """Read a study.

    Raises:
        ValueError: a name in it is unknown, or two cells are the same.
    """
    text = tomllib.loads(path.read_text())
    named(path, "", text, KEYS)
    arms, settings = text.get("arms", {}), text.get("settings", {"default": {}})
    common = {**text, "arms": list(arms), "settings": list(settings)}
    blocks = [{**common, **block} for block in text.get("grid", [{}])]
    cells: list[Cell] = []
    for block, own in zip(blocks, text.get("grid", [{}]), strict=True):
        named(path, "grid: ", own, BLOCK)
        named(path, "arms: ", block["arms"], arms)
        named(path, "settings: ", block["settings"], settings)
        # All arms of a seed before the next seed: a study that is cut off has paired runs.
        product = itertools.product(numbers(block["seeds"]), block["tasks"], block["settings"], block["arms"])
        for seed, task, setting, arm in product:
            overrides = {**settings[setting], **arms[arm]}
            rollouts = block.get("rollouts")
            cells.append(Cell(path.stem, task, arm, setting, seed, overrides, rollouts))
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError(f"{path.name}: blocks of `grid` share cells; allowed is each cell once.")
    base = text.get("base")
    named(path, "base: ", [base] if base else [], arms)
    options = {name: text[name] for name in ("base", "level", "height", "labels") if name in text}
    curves = tuple(text.get("curves", ()))
    return Study(path.stem, **options, curves=curves, cells=tuple(cells), folder=path.parent)


def named(path: Path, where: str, names: Any, allowed: Any) -> None:
    """Check names.

    Raises:
        ValueError: one of them is not allowed.
    """
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"{path.name}: {where}{unknown}; allowed are {', '.join(allowed)}.")


def numbers(seeds: Sequence[int | str]) -> Iterator[int]:
    """Read seeds: numbers, and ranges such as "700-729"."""
    for seed in seeds:
        first, _, last = str(seed).partition("-")
        yield from range(int(first), int(last or first) + 1)
