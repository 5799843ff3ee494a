"""Places of the data sets on the Hub, and their files for training and evaluation.

Files are named one by one instead of a configuration: what is not needed is not downloaded, and
repositories with a loading script, which `datasets` refuses, can be read all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from . import readers
from .readers import Layout

FLASHRAG_HUB = "RUC-NLPIR/FlashRAG_datasets"
_FORMATS = {"jsonl": "json", "parquet": "parquet"}


@dataclass(frozen=True)
class Source:
    """One data set in one repository.

    Attributes:
        name: what the data set is called here.
        hub: repository on the Hub, `owner/name`.
        train, evaluation: files in it, with wildcards; None where there are none with answers.
        layout: how its rows are read.
    """

    name: str
    hub: str
    train: str | None
    evaluation: str | None
    layout: Layout

    def files(self, split: str) -> str:
        """The files of `"train"` or `"eval"`.

        Raises:
            ValueError: it has none.
        """
        files = {"train": self.train, "eval": self.evaluation}[split]
        if files is None:
            other = "eval" if split == "train" else "train"
            raise ValueError(
                f"{self.name} has no rows for --{split} (in {self.hub}); name it in --{other} only."
            )
        return files

    def location(self, split: str, local: str | None = None, revision: str | None = None) -> str:
        """Path or address of the files.

        Args:
            split: `"train"` or `"eval"`.
            local: a folder with copies of the repositories, `local/owner/name/..`.
            revision: branch, tag or commit on the Hub.
        """
        if local is not None:
            return f"{local}/{self.hub}/{self.files(split)}"
        pinned = "" if revision is None else f"@{quote(revision, safe='')}"
        return f"hf://datasets/{self.hub}{pinned}/{self.files(split)}"

    def format(self, split: str) -> str:
        """The builder of `datasets` that reads the files."""
        return _FORMATS[self.files(split).rpartition(".")[2]]


def _flashrag(name: str, train: str | None, evaluation: str | None) -> Source:
    return Source(
        name,
        FLASHRAG_HUB,
        train and f"{name}/{train}.jsonl",
        evaluation and f"{name}/{evaluation}.jsonl",
        readers.FLASHRAG,
    )


def _parquet(name: str, hub: str, train: str | None, evaluation: str | None, layout: Layout) -> Source:
    return Source(
        name,
        hub,
        train and f"{train}-*.parquet",
        evaluation and f"{evaluation}-*.parquet",
        layout,
    )


# Evaluation splits as in Search-R1's table: the test split, or dev where test has no answers.
_FLASHRAG_SOURCES = [
    _flashrag("nq", "train", "test"),
    _flashrag("triviaqa", "train", "test"),
    _flashrag("popqa", None, "test"),
    _flashrag("hotpotqa", "train", "dev"),
    _flashrag("2wikimultihopqa", "train", "dev"),
    _flashrag("musique", "train", "dev"),
    _flashrag("bamboogle", None, "test"),
]
_CHOICE_SOURCES = [
    Source(
        "medqa",
        "GBaker/MedQA-USMLE-4-options",
        *("phrases_no_exclude_train.jsonl", "phrases_no_exclude_test.jsonl"),
        readers.MEDQA,
    ),
    # Its test split hides the answers.
    _parquet("medmcqa", "openlifescienceai/medmcqa", "data/train", "data/validation", readers.MEDMCQA),
    _parquet(
        "pubmedqa",
        "qiaojin/PubMedQA",
        *("pqa_artificial/train", "pqa_labeled/train"),
        readers.PUBMEDQA,
    ),
]
SOURCES = {s.name: s for s in [*_FLASHRAG_SOURCES, *_CHOICE_SOURCES]}
DATASETS = tuple(SOURCES)


def find_source(name: str) -> Source:
    """The data set of that name, one of `DATASETS`.

    Raises:
        ValueError: there is no such data set.
    """
    if name not in SOURCES:
        raise ValueError(f"There is no data set {name!r}; known are {', '.join(DATASETS)}.")
    return SOURCES[name]
