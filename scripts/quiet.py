"""To be called before the libraries are imported, which read their surroundings then."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def quieten() -> None:
    """Keep dependencies' notes to each other off the screen; and a dry run off the network."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if {"--dry_run", "--dry-run"} & set(sys.argv):
        os.environ["HF_HUB_OFFLINE"] = "1"
