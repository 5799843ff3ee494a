"""Names beside the ends of lines, where a reader looks for them first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

End = tuple[float, float]
# Labels stand beside the lines if they are no more and no longer than this, else in a legend.
MOST_ENDS, LONGEST_END = 6, 14


def end_labels(groups: Mapping[str, Sequence[Any]]) -> list[str]:
    """What stands beside the ends of the lines; nothing where that is one, or too long or too much."""
    repeated = any(len(histories) > 1 for histories in groups.values())
    fits = len(groups) <= MOST_ENDS and max(map(len, groups)) <= LONGEST_END
    if not fits or (len(groups) == 1 and not repeated):
        return []
    runs = {k: f"\n{len(some)} runs" if len(some) > 1 else "" for k, some in groups.items()}
    return [name + number for name, number in runs.items()]


def label_ends(
    axis: Axes, drawn: Sequence[End], labels: Sequence[str], styles: Sequence[dict[str, Any]]
) -> None:
    """Name each line of a panel beside its end, in the order of the ends and without overlap.

    Args:
        axis: with its final limits.
        drawn: where each line ends, in data.
        labels: one per line, or none at all.
        styles: of the lines.
    """
    to_axes = axis.transData + axis.transAxes.inverted()
    ends = [
        (float(to_axes.transform(end)[1]), end, label, index)
        for index, (end, label) in enumerate(zip(drawn, labels, strict=False))
    ]
    ends.sort()
    heights = [0.1 + 0.08 * label.count("\n") for _, _, label, _ in ends]
    places, low, high = [], 0.0, 1.05
    for (at, *_), height in zip(ends, heights, strict=True):
        places.append(max(at - height / 2, low))
        low = places[-1] + height
    for i in reversed(range(len(places))):
        high = places[i] = min(places[i], high - heights[i])
    for (_, end, label, index), place, height in zip(ends, places, heights, strict=True):
        axis.annotate(
            label,
            end,
            (1.06, place + height / 2),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            parse_math=False,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "shrinkA": 0, "shrinkB": 0, **styles[index]},
        )
