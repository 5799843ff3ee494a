"""Which values of a long list each run of the tests tries, and which the slow ones do."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *now: Any) -> list[Any]:
    """Parameters for all values; those that are not named after them are marked slow."""
    values = list(values)
    unknown = [value for value in now if value not in values]
    assert not unknown, f"{unknown} are not among the values"
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
        for marks in [() if value in now else pytest.mark.slow]
    ]
