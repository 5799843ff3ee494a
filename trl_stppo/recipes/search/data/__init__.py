"""Question-answering data sets as rows for training agents that search (docs/recipes.md)."""

from .mixing import Prepared, prepare, report_lines
from .saving import check_output, save
from .sources import DATASETS, FLASHRAG, ORIGINAL, find_source

__all__ = [
    "DATASETS",
    "FLASHRAG",
    "ORIGINAL",
    "Prepared",
    "check_output",
    "find_source",
    "prepare",
    "report_lines",
    "save",
]
