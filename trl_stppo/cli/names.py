"""Names that flags give of models and of data: paths here are told from names on the Hub.

What looks like a path and is none is refused before the Hub is asked for it, which takes half a minute
where there is no network.
"""

from __future__ import annotations

from pathlib import Path

from .usage import UsageError

# Endings of files with rows -> the loader that datasets has for them.
ROWS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

NO_MODEL = "`--model_name_or_path` is missing. Name a checkpoint, or a model of the Hub."

UNPAID = "there is neither `environment` nor `reward_funcs`. Name one of them."


def no_rows(environment: str | None) -> UsageError:
    """What is wrong where neither flags nor an environment name rows."""
    return UsageError(
        f"`dataset_name` is not set, and environment={environment} has no rows of its own. Name a file or a "
        f"folder of rows, or a data set of the Hub."
    )


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a path: `./agent`, `runs/agent`, `a/b/c`, `rows.jsonl`."""
    starts_as_one = name.startswith((".", "/", "~", "runs/"))
    return starts_as_one or name.count("/") > 1 or Path(name).suffix in ROWS


def check_name(flag: str, name: str | None, fix: str = "Check the path") -> None:
    """Refuse a path that is not there.

    Args:
        flag: that gives the name.
        name: of a file, of a folder, or on the Hub.
        fix: what to do, without a full stop.

    Raises:
        FileNotFoundError: it looks like a path, and nothing is there.
    """
    if name is None or Path(name).exists() or not looks_like_path(name):
        return
    if name.startswith("~"):
        fix = "Write `~` out, which only a shell does"
    where = "" if Path(name).is_absolute() else f", seen from {Path.cwd()}"
    raise FileNotFoundError(
        f"`{flag}={name}` is no file or folder here{where}, and looks like a path rather than a name on "
        f"the Hub. {fix}."
    )
