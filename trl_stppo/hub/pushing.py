"""The model card of a run, the files that a push leaves out, and errors and warnings of failed pushes."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from ..errors import HubError
from ..redaction import redacted
from ..watch.runs import MEASURES, SCORE, number

CARD = "README.md"
GENERATED = "generated_from_trainer"
SETTINGS = (
    *("variant", "stabilizers", "learning_rate", "cliprange", "generation_batch_size"),
    *("num_ppo_epochs", "num_mini_batches", "kl_coef", "temperature", "seed"),
)
OF_CRITIC = ("critic_learning_rate", "gamma", "lam", "cliprange_value")


def may_be_written(path: Path) -> bool:
    """Return whether a model card may be overwritten: it is missing, or a trainer has written it."""
    try:
        return not path.exists() or GENERATED in (metadata_load(path) or {})["tags"]
    except Exception:
        return False


def add_run(
    path: Path, repo: str, settings: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> None:
    """Add results and settings to the card that TRL has written.

    `settings` are the run's settings, without secrets. `history` is its log.
    """
    rows = [[f"`{name}`", f"`{value}`"] for name, value in settings.items() if value is not None]
    sections = {
        "Agent": f"`trl_stppo.Agent.from_pretrained({repo!r})` plays as the run's evaluation did.",
        "Results": results(history),
        "Settings": _table(["option", "value"], rows),
    }
    text = "".join(f"## {name}\n\n{text}\n\n" for name, text in sections.items() if text)
    before, heading, after = path.read_text(encoding="utf-8").partition("## Training procedure")
    # TRL's card links to "None" for a base model in a folder, and for an agent without a repository.
    before = before.replace("[None](https://huggingface.co/None)", "a model in a local folder")
    before = before.replace('model="None"', f'model="{repo}"')
    path.write_text(f"{before.rstrip()}\n\n{text}{heading}{after}", encoding="utf-8")


def results(history: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the log's last evaluation, with 95 % intervals, or "" without an evaluation."""
    last = {
        key.removesuffix(SCORE): entry
        for entry in history
        for key in entry
        if key.startswith("eval_") and key.endswith(SCORE)
    }
    step = max((entry["step"] for entry in last.values()), default=0)
    rows = [
        [
            prefix.removeprefix("eval_").removesuffix("_") or "held-out rows",
            *(_shown(entry, prefix + name) for name in MEASURES.values()),
        ]
        for prefix, entry in last.items()
        if entry["step"] == step
    ]
    return _table(["data", *MEASURES], rows)


def _shown(figures: Mapping[str, Any], name: str) -> str:
    value, low, high = (number(figures.get(name + end)) for end in ("", "_low", "_high"))
    bounds = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return "" if value is None else f"{round(value, 3):g}{bounds}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) if rows else ""


logger = logging.getLogger(__name__)

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
    text = redacted(" ".join(str(error).split()))[:1500]
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
        f"The repository {repo!r} could not be created or reached: {reason(error)} Allowed are a "
        f"`hub_model_id` in an account or organisation of yours that can be reached, or `push_to_hub=False`."
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
