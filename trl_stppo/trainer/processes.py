"""What some processes of a run do, and all of them hear of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import gather_object

Result = TypeVar("Result")


def done_by(here: bool, call: Callable[[], Result]) -> list[Result]:
    """Call something on some of the processes while the others wait.

    An exception of one of them is raised on all, so that nobody waits for who has ended.

    Returns:
        What came of it on each of them, on all processes.
    """
    result, error = [], None
    try:
        if here:
            result.append(call())
    except Exception as raised:
        error = raised
    told = None if error is None else (type(error), str(error))
    ends = gather_object([(result, told)])
    if error is not None:
        raise error
    for _, theirs in ends:
        if theirs is not None:
            kind, message = theirs
            raise kind(message)
    return [one for results, _ in ends for one in results]
