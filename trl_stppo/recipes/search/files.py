"""Folders that are either complete or not there: built aside, renamed at the end."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

# A folder -> the names of the files that belong to a result of this package; a ValueError, which says
# why, where it holds none.
Owned = Callable[[Path], Set[str]]


@contextmanager
def built_aside(target: str | Path, owned: Owned, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to build in; on success it becomes `target`, on an error it is removed.

    A killed build leaves a folder `.NAME.building-...` beside the target; in it, where the end came
    between the two renames, the earlier result as `earlier`.

    Args:
        target: where the result is to be.
        owned: tells an earlier result, which may be replaced, from anything else, which may not.
        overwrite: replace an earlier result, once the new one is complete.

    Raises:
        FileExistsError: there is something that is not to be replaced, from the beginning or since.
        OSError: the folder cannot be written or renamed.
    """
    target = Path(target).absolute()
    before = check_target(target, owned, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Folders inside of it: one that `mkdtemp` makes can be read by its owner only.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    building, earlier = staging / "new", staging / "earlier"
    try:
        building.mkdir()
        yield building
        if check_target(target, owned, overwrite=overwrite) != before:
            raise FileExistsError(
                f"{target} has appeared or been replaced meanwhile, and is left as it is. Build into "
                "another folder."
            )
        if before is not None:
            target.rename(earlier)
        try:
            building.rename(target)
        except BaseException:
            if before is not None:
                earlier.rename(target)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        # Still there is only what could not be put back.
        if not earlier.exists():
            shutil.rmtree(staging, ignore_errors=True)


def check_target(
    target: str | Path, owned: Owned, *, overwrite: bool = False
) -> tuple[int, int] | None:
    """Make sure that a result may be put there, before anything is built.

    Args:
        target: where the result is to be.
        owned: as in `built_aside`.
        overwrite: whether an earlier result may be replaced.

    Returns:
        What tells the folder that is there from any other; None where there is none.

    Raises:
        FileExistsError: there is something that is not to be replaced.
    """
    target = Path(target)
    if target.is_symlink():
        raise FileExistsError(
            f"{target} is a symbolic link, and is not replaced. Name the folder that it leads to "
            f"({os.path.realpath(target)}), or another one."
        )
    if not target.exists():
        return None
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file, and is not replaced. Name a folder.")
    there = {path.name for path in target.iterdir()}
    if there and not overwrite:
        raise FileExistsError(
            f"{target} exists. Name another folder, or, if an earlier result is to be replaced, pass "
            "overwrite=True (--overwrite)."
        )
    if there:
        _check_owned(target, there, owned)
    status = target.stat()
    return status.st_dev, status.st_ino


def _check_owned(target: Path, there: Set[str], owned: Owned) -> None:
    try:
        foreign = sorted(there - owned(target))
    except (OSError, ValueError) as error:
        raise FileExistsError(
            f"{target} is no earlier result of this kind ({error}), and is not replaced. Name "
            "another folder, or remove it yourself."
        ) from error
    if foreign:
        raise FileExistsError(
            f"{target} holds {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''} besides an "
            "earlier result, and is not replaced. Move it away, or name another folder."
        )
