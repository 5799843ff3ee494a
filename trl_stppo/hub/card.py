"""Write the model card: TRL's card, with a section about the agent in place of TRL's example."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from ..redaction import redacted
from ..version import __version__
from .description import Description
from .markdown import code, escaped, fenced, plain, table
from .results import last_evaluations, model_index, results_table

CARD = "README.md"
GENERATED = "generated_from_trainer"  # transformers' tag on its cards
# PEFT's additions to the Hub's template, which it saves beside an adapter ...
ADDED_TO_FORM = re.compile(r"### Framework versions|- PEFT \S+")
# ... and to our card, whose tag it removes.
ADDED_TO_OURS = re.compile(r"^### Framework versions\n\n- PEFT \S+\n- trl-stppo: ", re.M)
# Settings on the card.
SETTINGS = (
    *("variant", "stabilizers", "learning_rate", "cliprange", "generation_batch_size"),
    *("num_ppo_epochs", "num_mini_batches", "kl_coef", "temperature", "seed"),
)
OF_CRITIC = ("critic_learning_rate", "gamma", "lam", "cliprange_value")


def may_be_written(folder: Path) -> bool:
    """Return whether a folder's model card may be overwritten: it is missing or generated."""
    path = folder / CARD
    if not path.exists():
        return True
    try:
        header = metadata_load(path)
        if not header:  # generated cards have one
            return False
        tags = header.get("tags")
        if isinstance(tags, list) and GENERATED in tags:
            return True
        text = ModelCard.load(path).text
        form = set(ModelCard.from_template(ModelCardData()).text.splitlines())
        lines = [line for line in text.splitlines() if line.strip()]
        blank = lines and all(line in form or ADDED_TO_FORM.fullmatch(line) for line in lines)
        return bool(blank) or ADDED_TO_OURS.search(text) is not None
    except Exception:  # a damaged header: a user's
        return False


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Context manager that restores a folder's card at its end, since saving with PEFT changes the card."""
    path = (folder / CARD).resolve()
    if not path.exists():
        yield
        return
    aside = path.with_name(f"_{CARD}")  # uploads ignore this prefix
    shutil.copy2(path, aside)  # before: a failed save may leave no space
    try:
        yield
    finally:
        os.replace(aside, path)


def improve(
    folder: Path,
    run: Description,
    *,
    title: str,
    repo: str,
    base_model: str | None,
    datasets: Sequence[str],
    tags: Sequence[str],
    history: Sequence[Mapping[str, Any]],
    transcript: str | None,
) -> None:
    """Put the section about the agent into the card that TRL has just written.

    `base_model` and `datasets` are ids on the Hub; `base_model` is None without one. `history` is the run's
    log. `transcript` is an episode in text, None if its row may not be shown.
    """
    card, evaluations = ModelCard.load(folder / CARD), last_evaluations(history)
    base = escaped(base_model) if base_model else "a local model"
    heading = f"# {escaped(title, 120)}\n\nFine-tuned from {base}.\n\n"
    agent = section(run, repo, results_table(evaluations), transcript)
    parts = re.split(r"^(?=## )", card.text, flags=re.M)
    upstream = [p for p in parts if p.startswith(("## Training procedure", "## Citations"))]
    versions = "### Framework versions\n\n"
    text = heading + agent + "".join(upstream)
    card.text = redacted(text.replace(versions, f"{versions}- trl-stppo: {__version__}\n"))
    data: Any = card.data
    data.pop("licence")  # TRL's spelling, unknown to the Hub
    data.base_model, data.datasets = base_model, [plain(name) for name in datasets] or None
    data.library_name = "peft" if run.adapter else "transformers"
    data.pipeline_tag, data.model_name = "text-generation", plain(title)
    tags = [*tags, *sorted(data.tags or []), *(["lora"] if run.adapter_kind == "LoRA" else [])]
    data.tags = list(dict.fromkeys(map(plain, tags)))
    played = ", ".join(each.class_name for each in run.environments) or "held-out rows"
    data.eval_results = model_index(evaluations, plain(played)) or None
    card.save(folder / CARD)


def section(run: Description, repo: str, results: str, transcript: str | None) -> str:
    """Return the card's section about an agent, in Markdown."""
    shown = [name for name in SETTINGS if run.settings.get(name)]
    shown += [name for name in OF_CRITIC if run.critic != "none" and run.settings.get(name)]
    rows = [(code(name), code(run.settings[name], 120)) for name in shown]
    shown_about = ((code(e.class_name, 80), escaped(e.about, 500)) for e in run.environments)
    about = [f"{name}: {text or 'no description.'}" for name, text in shown_about]
    critic = {"none": "", "shared": " `critic/` holds the critic's adapter and value head."}
    parts = [
        "## Agent",
        f"An agent over several turns, trained with {escaped(run.method)} by {code(run.trainer)} of "
        f"`trl-stppo`. Policy: {escaped(run.training)}.",
        *about,
        fenced(_example(run, repo), "python"),
        "`agent.json` holds limits and sampling of its evaluation."
        + critic.get(run.critic, " `critic/` holds the critic."),
        *(["### Results", results] if results else []),
        *(["### An episode", fenced(transcript, "text", 2000)] if transcript else []),
        "### Settings",
        table(("option", "value"), rows),
    ]
    return "\n\n".join(parts) + "\n\n"


def _example(run: Description, repo: str) -> str:
    lines = ["from trl_stppo import Agent", "", f"agent = Agent.from_pretrained({plain(repo)!r})"]
    if not run.environments:
        lines.append('print(agent.act([{"role": "user", "content": "Hello"}]))')
        return "\n".join(lines)
    environment, name = run.environments[0], "YourEnvironment"
    if environment.importable:
        name = environment.class_name
        lines.insert(1, f"from {environment.module} import {name}")
    factory = name if environment.name is None else f"{{{plain(environment.name)!r}: {name}}}"
    lines.append(f"episode = agent.run({factory}, row)  # a row of data, as a dict")
    return "\n".join([*lines, "print(episode)"])
