"""Question-answering data sets as rows for training agents that search (docs/recipes.md)."""

from .mixing import Prepared, prepare
from .saving import check_output, save
from .sources import DATASETS, find_source

__all__ = ["DATASETS", "Prepared", "check_output", "find_source", "prepare", "save"]
