"""Function calls on some processes of a run, whose results and errors reach all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import gather_object

Result = TypeVar("Result")


def done_by(here: bool, call: Callable[[], Result]) -> list[Result]:
    """Call a function on some processes; return its results, or raise its exception, on all processes."""
    result, error = [], None
    try:
        if here:
            result.append(call())
    except Exception as raised:
        error = raised
    failure = None if error is None else (type(error), str(error))
    ends = gather_object([(result, failure)])
    if error is not None:
        raise error
    for _, theirs in ends:
        if theirs is not None:
            kind, message = theirs
            raise kind(message)
    return [one for results, _ in ends for one in results]
