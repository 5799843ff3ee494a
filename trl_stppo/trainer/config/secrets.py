"""A configuration that hides its secrets when it is saved, pushed or printed."""

from __future__ import annotations

import copy
from typing import Any

from ...redaction import redacted


class KeepsSecrets:
    """Base class, listed before TRL's, that removes secrets from pickles, `to_dict` and text."""

    # Upstream pickles and pushes the arguments.
    def __getstate__(self) -> dict[str, object]:
        return redacted(self.__dict__, blank=None)

    def __copy__(self) -> KeepsSecrets:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepsSecrets:
        memo[id(self)] = copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _without_secrets(self) -> Any:
        clean = object.__new__(type(self))
        clean.__dict__.update(redacted(self.__dict__, blank=None))
        return super(KeepsSecrets, clean)

    def to_dict(self) -> dict[str, Any]:
        """Return upstream's dictionary of settings without secrets, for trackers and TensorBoard."""
        return self._without_secrets().to_dict()

    def __str__(self) -> str:
        return self._without_secrets().__str__()

    __repr__ = __str__
