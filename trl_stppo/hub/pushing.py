"""Errors and warnings of failed pushes to the Hub."""

from __future__ import annotations

import logging
import shlex
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..errors import HubError
from ..redaction import redacted

logger = logging.getLogger(__name__)

# Episodes in checkpoints.
EPISODES = "episodes_*.pt"
# Files of the output directory that transformers does not upload.
LEFT_OUT = ("_*", "checkpoint-*")
# Files that this package does not upload: recorded episodes contain training data; the log has settings
# and data of this machine; a downloaded checkpoint is on the Hub.
LEFT_OUT_TOO = (
    *("trace/*", "trace.html", EPISODES, "metrics*.jsonl", ".*.writing"),
    "last-checkpoint/*",
)


def reason(error: BaseException) -> str:
    """Return an error's type and message on one line, without secrets."""
    text = redacted(" ".join(str(error).split()))[:300]
    return f"{type(error).__name__}: {text.rstrip('.')}."


def failed_push(
    error: BaseException, repo: str, folder: Path, revision: str | None = None
) -> HubError:
    """Return the `HubError` for a failed push at the end of a run."""
    words = ["hf", "upload", repo, str(folder), "."]
    words += ["--revision", revision] if revision else []
    for pattern in (*LEFT_OUT, *LEFT_OUT_TOO):
        words += ["--exclude", pattern]
    return HubError(
        f"The push to {repo!r} failed: {reason(error)} Model, critic and card are in `{folder}`. Push again "
        f"with `trainer.push_to_hub()`, or from a shell with `{shlex.join(words)}`."
    )


def failed_creation(error: BaseException, repo: str) -> HubError:
    """Return the error for a repository that can be neither created nor reached."""
    return HubError(
        f"The repository {repo!r} could not be created or reached: {reason(error)} Set `hub_model_id` to a "
        f"name in your account or organisation, or `push_to_hub=False`."
    )


def warn_of_failed_push(error: BaseException, repo: str, folder: Path) -> None:
    """Warn of a failed push in the middle of a run; training goes on."""
    text = "The push of `%s` to %r failed, and training goes on; the next push includes it: %s"
    logger.warning(text, folder, repo, reason(error))


def watch(job: Future[Any], repo: str, folder: Path) -> None:
    """Warn if a background upload of a folder fails. transformers ignores such errors."""

    def finished(done: Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            warn_of_failed_push(error, repo, folder)

    job.add_done_callback(finished)
