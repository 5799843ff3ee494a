"""Wrong words on a command line, and what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..wording import GONE, RENAMED, closest, named, proposal

__all__ = ["UsageError", "advice", "closest", "named"]


class UsageError(ValueError):
    """Words, or keys of a file, that a command cannot make sense of."""


def advice(
    name: str, known: Collection[str], elsewhere: Mapping[str, Collection[str]], dashes: str = "--"
) -> str:
    """What to write instead of a flag's name that is not known.

    Args:
        name: without dashes.
        known: flags of this command, without dashes.
        elsewhere: command -> its flags.
        dashes: before a name that is proposed; none for keys of a file.
    """
    name = name.replace("-", "_")
    renamed = RENAMED.get(name) in known or name in GONE
    owners = [command for command, flags in elsewhere.items() if name in flags]
    if owners and not renamed:
        return f"It is a flag of {named(owners)}."
    otherwise = "Correct the name, or take it out; --help_all lists all flags."
    return proposal(name, known, dashes) or otherwise
