"""The model card: TRL's, with what one wants to know of an agent in place of its stock example."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load
from jinja2 import Environment, PackageLoader

from ..redaction import redacted
from ..version import __version__
from . import markdown
from .description import Description
from .markdown import plain
from .results import last_evaluations, model_index, results_table

logger = logging.getLogger(__name__)

CARD = "README.md"
PICTURE = "assets/curves.png"
GENERATED = "generated_from_trainer"  # upstream's tag on every card that it writes
# What PEFT adds to the Hub's form for cards, which it leaves beside an adapter.
ADDED_TO_FORM = re.compile(r"### Framework versions|- PEFT \S+")
# ... and to a card of ours, from which it takes the tag.
ADDED_TO_OURS = re.compile(r"^### Framework versions\n\n- PEFT \S+\n- trl-stppo: ", re.M)
PANELS = 3  # of the picture; the run's own has them all
# Figures that say how a run went; without two of them there is no curve to draw.
CURVES = ("episode/score", "episode/success_rate", "reward", "loss")


def may_be_written(folder: Path) -> bool:
    """Whether a folder has no card, or one that a program has written; any other is its user's."""
    path = folder / CARD
    if not path.exists():
        return True
    try:
        header = metadata_load(path)
        if not header:  # every program writes one
            return False
        tags = header.get("tags")
        if isinstance(tags, list) and GENERATED in tags:
            return True
        text = ModelCard.load(path).text
        return _is_blank(text) or ADDED_TO_OURS.search(text) is not None
    except Exception:  # whatever is wrong with its header, somebody has written it
        return False


def _is_blank(text: str) -> bool:
    """Whether a card is the form that nobody has filled in."""
    form = set(ModelCard.from_template(ModelCardData()).text.splitlines())
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and all(line in form or ADDED_TO_FORM.fullmatch(line) for line in lines)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Give a card back its words and tags: PEFT changes both in any that is there when it saves."""
    path = (folder / CARD).resolve()
    if not path.exists():
        yield
        return
    aside = path.with_name(f"_{CARD}")  # upstream leaves out of an upload what begins like this
    shutil.copy2(path, aside)  # now: there may be no room for it when saving has failed
    try:
        yield
    finally:
        os.replace(aside, path)


def improve(
    folder: Path,
    run: Description,
    *,
    title: str,
    base_model: str | None,
    licence: str | None,
    datasets: Sequence[str],
    tags: Sequence[str],
    history: Sequence[Mapping[str, Any]],
    draw: bool = True,
    **shown: Any,
) -> None:
    """Make an agent's card of the one that TRL has just written into a folder.

    Args:
        folder: holds the card; the picture goes there too.
        run: what it is.
        title: of the card.
        base_model: id on the Hub, None where it has none there.
        licence: of the base model, where known.
        datasets: ids on the Hub.
        tags: of the repository.
        history: the run's log.
        draw: draw the learning curves anew; otherwise an earlier picture stays.
        **shown: `repo`, `example`, `offered`, `episode`, `system_prompt`, `play` and `turn_ends` as of
            `render`.
    """
    card = ModelCard.load(folder / CARD)
    upstream, evaluations = _sections(card.text), last_evaluations(history)
    shown |= {"title": title, "base_model": base_model, "datasets": datasets}
    shown |= {"evaluations": evaluations, "picture": _picture(folder, run, history, draw)}
    card.text = redacted(render(run, upstream=upstream, **shown))
    data: Any = card.data
    data.pop("licence")  # TRL's own word, which the Hub does not know
    data.base_model, data.license = base_model, licence
    data.datasets = [plain(name) for name in datasets] or None
    data.library_name = "peft" if run.adapter else "transformers"
    data.pipeline_tag = "text-generation"
    tags = [*tags, *sorted(data.tags or [])]  # TRL's come in any order
    tags += ["lora"] if run.adapter_kind == "LoRA" else []
    data.tags = list(dict.fromkeys(plain(tag) for tag in tags))
    data.model_name = plain(title)
    played = ", ".join(e.class_name for e in run.environments) or "held-out rows"
    data.eval_results = model_index(evaluations, plain(played)) or None
    card.save(folder / CARD)


def render(run: Description, **shown: Any) -> str:
    """The text of a card.

    Args:
        run: what it is.
        **shown: variables of the template; besides those of `improve`: `repo`, by which the policy is
            loaded; `example`, the form of a row; `offered`, the name under which the environment's class
            offers the rows, and an `episode` of them that may be shown; `system_prompt` of the rows; `play`,
            the fields of `agent.json`; `turn_ends`, tokens that end a turn; `upstream`, what TRL has written.
    """
    return _environment().get_template("card.md").render(run=run, **shown)


class _Markdown(str):
    """Text that stands in the card as it is."""


@functools.cache
def _environment() -> Environment:
    """Jinja's, in which all text is escaped that no filter has made Markdown of."""

    def filter_of(function: Callable[..., str]) -> Callable[..., _Markdown]:
        return lambda *args: _Markdown(function(*args))

    made = Environment(
        loader=PackageLoader(__package__, "template"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda part: part if isinstance(part, _Markdown) else markdown.escaped(part),
    )
    names = ("cell", "code", "escaped", "fenced", "hub_link", "literal", "plain", "prose", "quoted")
    made.filters |= {name: filter_of(getattr(markdown, name)) for name in names}
    made.filters |= {"markdown": _Markdown, "results_table": filter_of(results_table)}
    return made


def _sections(text: str) -> dict[str, str]:
    """TRL's sections by their headings; this package is put among the versions."""
    parts = re.split(r"^(?=##)", re.sub(r"\n\s*\n", "\n\n", text), flags=re.M)
    own = f"### Framework versions\n\n- trl-stppo: {__version__}\n"
    parts = [part.replace("### Framework versions\n\n", own).strip() for part in parts]
    return {part.split("\n")[0].lstrip("# "): part for part in parts}


def _picture(
    folder: Path, run: Description, history: Sequence[Mapping[str, Any]], draw: bool
) -> str | None:
    """Path of the learning curves in the repository, None where there are none."""
    path = folder / PICTURE
    steps = [entry for entry in history if any(name in entry for name in CURVES)]
    if draw and len(steps) > 1 and importlib.util.find_spec("matplotlib"):
        try:
            _draw(path, run.variant or run.method, history)
        except Exception as error:  # a picture is worth no run
            logger.warning(
                "The learning curves were not drawn: %s: %s", type(error).__name__, error
            )
    return PICTURE if path.is_file() else None


def _draw(path: Path, name: str, history: Sequence[Mapping[str, Any]]) -> None:
    from ..watch.curves import chosen, draw_groups

    path.parent.mkdir(parents=True, exist_ok=True)
    # Upstream leaves out of an upload what begins like this; a torn picture is never seen.
    half_done = path.parent / f"_{path.name}"
    groups = {name: [list(history)]}
    first = [diagnostic.metric for diagnostic in chosen(groups, None)[:PANELS]]
    draw_groups(groups, half_done, metrics=first)
    os.replace(half_done, path)
