"""The model card: TRL's, with what one wants to know of an agent in place of its stock example."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from ..redaction import redacted
from . import sections
from .facts import CardFacts
from .markdown import escaped, plain
from .results import Evaluation, last_evaluations, model_index

logger = logging.getLogger(__name__)

CARD = "README.md"
PICTURE = "assets/curves.png"
GENERATED = "generated_from_trainer"  # upstream's tag on every card that it writes
# What PEFT adds to the Hub's form for cards, which it leaves beside an adapter.
ADDED_TO_FORM = re.compile(r"### Framework versions|- PEFT \S+")
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
        return _is_blank(ModelCard.load(path).text)
    except Exception:  # whatever is wrong with its header, somebody has written it
        return False


def _is_blank(text: str) -> bool:
    """Whether a card is the form that nobody has filled in."""
    form = set(ModelCard.from_template(ModelCardData()).text.splitlines())
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and all(line in form or ADDED_TO_FORM.fullmatch(line) for line in lines)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Give a user's card back its words: PEFT adds its own to any that is there when it saves."""
    if may_be_written(folder):
        yield
        return
    path = (folder / CARD).resolve()
    aside = path.with_name(f"_{CARD}")  # upstream leaves out of an upload what begins like this
    shutil.copy2(path, aside)  # now: there may be no room for it when saving has failed
    try:
        yield
    finally:
        os.replace(aside, path)


def improve(folder: Path, facts: CardFacts, *, draw: bool = True) -> None:
    """Make an agent's card of the one that TRL has just written into a folder.

    Args:
        folder: holds the card; the picture goes there too.
        facts: of the run.
        draw: draw the learning curves anew; otherwise an earlier picture stays.
    """
    path = folder / CARD
    card = ModelCard.load(path)
    evaluations = last_evaluations(facts.history)
    picture, why_not = _picture(folder, facts, draw)
    training, citations = _upstreams(card.text)
    parts = [
        f"# {escaped(facts.title, 120)}",
        sections.introduction(facts),
        sections.usage(facts),
        sections.environments(facts),
        sections.results(evaluations, picture, why_not),
        training,
        sections.settings(facts),
        _versions(card.text, facts),
        sections.files(facts),
        citations,
    ]
    card.text = redacted("\n\n".join(part.strip() for part in parts if part.strip()) + "\n")
    _set_data(card, facts, evaluations)
    card.save(path)


def _upstreams(text: str) -> tuple[str, str]:
    """TRL's sections on training and on whom to cite, without those between and before."""
    training = re.search(r"^## Training procedure\n.*?(?=^##)", text, re.M | re.S)
    citations = re.search(r"^## Citations\n.*", text, re.M | re.S)
    said = training[0] if training else "## Training procedure"
    return re.sub(r"\n\s*\n", "\n\n", said), citations[0] if citations else ""


def _versions(text: str, facts: CardFacts) -> str:
    found = re.search(r"^### Framework versions\n+((?:- .*\n?)+)", text, re.M)
    lines = [f"- {plain(name)}: {plain(version)}" for name, version in facts.versions]
    lines += found[1].strip().splitlines() if found else []
    return "### Framework versions\n\n" + "\n".join(lines) if lines else ""


def _set_data(card: ModelCard, facts: CardFacts, evaluations: Sequence[Evaluation]) -> None:
    data: Any = card.data
    data.pop("licence")  # TRL's own word, which the Hub does not know
    data.base_model = facts.base_model
    data.license = facts.licence
    data.datasets = [plain(name) for name in facts.datasets] or None
    data.library_name = "peft" if facts.adapter else "transformers"
    data.pipeline_tag = "text-generation"
    tags = [*facts.tags, *sorted(data.tags or [])]  # TRL's come in any order
    tags += ["lora"] if facts.adapter == "LoRA" else []
    data.tags = list(dict.fromkeys(plain(tag) for tag in tags))
    data.model_name = plain(facts.title)
    played = ", ".join(e.class_name for e in facts.environments) or "held-out rows"
    data.eval_results = model_index(evaluations, plain(played)) or None


def _picture(folder: Path, facts: CardFacts, draw: bool) -> tuple[str | None, str | None]:
    """Path of the learning curves in the repository, or a sentence on why there are none."""
    path = folder / PICTURE
    steps = [entry for entry in facts.history if any(name in entry for name in CURVES)]
    if draw and len(steps) > 1:
        if importlib.util.find_spec("matplotlib") is None:
            return None, "Learning curves are left out: matplotlib was not installed."
        try:
            _draw(path, facts)
        except Exception as error:  # a picture is worth no run
            logger.warning(
                "The learning curves were not drawn: %s: %s", type(error).__name__, error
            )
    return (PICTURE, None) if path.is_file() else (None, None)


def _draw(path: Path, facts: CardFacts) -> None:
    from ..watch.curves import draw_curves

    path.parent.mkdir(parents=True, exist_ok=True)
    # Upstream leaves out of an upload what begins like this; a torn picture is never seen.
    half_done = path.parent / f"_{path.name}"
    draw_curves({facts.variant or facts.method: list(facts.history)}, half_done)
    os.replace(half_done, path)
