"""End of every benchmark: one line of JSON, and a status that says whether all of it was measured."""

from __future__ import annotations

import json
import sys
from typing import Any


def finish(figures: dict[str, Any]) -> None:
    """Print the figures; the exit status is 1 if any of them is an `error`.

    What could be measured is printed in every case.
    """
    print(json.dumps(figures), flush=True)
    if failures := list(errors(figures)):
        sys.exit(f"{len(failures)} failed; the first: {failures[0]}")


def errors(value: Any) -> list[str]:
    """Return the texts under `error`, at any depth."""
    if isinstance(value, list):
        return [error for one in value for error in errors(one)]
    if not isinstance(value, dict):
        return []
    nested = errors(list(value.values()))
    return [str(value["error"]), *nested] if value.get("error") else nested
