"""What is said, and kept, when a push to the Hub fails."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..errors import HubError
from ..redaction import redacted

logger = logging.getLogger(__name__)

# What upstream leaves out of an upload of the output directory.
LEFT_OUT = ("_*", "checkpoint-*")
# ... and we: recorded episodes are whole training data, and are shown only on purpose; the log names
# settings and data of this machine; a checkpoint that came from the Hub is there already.
EPISODES = "episodes_*.pt"  # in checkpoints
LEFT_OUT_TOO = (
    *("trace/*", "trace.html", EPISODES, "metrics*.jsonl", ".*.writing"),
    "last-checkpoint/*",
)


def push_command(repo: str, folder: Path, revision: str | None = None) -> str:
    """The command that uploads what upstream would have."""
    words = ["hf", "upload", repo, str(folder), "."]
    words += ["--revision", revision] if revision else []
    for pattern in (*LEFT_OUT, *LEFT_OUT_TOO):
        words += ["--exclude", pattern]
    return shlex.join(words)


def reason(error: BaseException) -> str:
    """The error on one line, without secrets."""
    text = redacted(" ".join(str(error).split()))[:300]
    return f"{type(error).__name__}: {text.rstrip('.')}."


def failed_push(
    error: BaseException, repo: str, folder: Path, revision: str | None = None
) -> HubError:
    """The error for a push at the end of a run."""
    return HubError(
        f"The push to {repo!r} failed: {reason(error)} Nothing is lost: the model, its critic and its "
        f"card lie in `{folder}`. Push again with `trainer.push_to_hub()`, or from a shell with "
        f"`{push_command(repo, folder, revision)}`."
    )


def failed_creation(error: BaseException, repo: str) -> HubError:
    """The error for a repository that can be neither made nor reached."""
    return HubError(
        f"The repository {repo!r} could not be created or reached: {reason(error)} Set `hub_model_id` to "
        f"a name of your own or of an organisation of yours, or `push_to_hub=False` to train without."
    )


def warn_of_failed_push(error: BaseException, repo: str, folder: Path) -> None:
    """Say that a push in the middle of a run failed; training goes on."""
    logger.warning(
        "The push of `%s` to %r failed, and training goes on: %s The checkpoint is whole on this disk, "
        "and the next push brings everything that has changed.",
        folder,
        repo,
        reason(error),
    )


def watch(job: Future[Any], told: Callable[[BaseException], None]) -> None:
    """Call `told` with what an upload in the background has raised; upstream never looks."""

    def finished(done: Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            told(error)

    job.add_done_callback(finished)
