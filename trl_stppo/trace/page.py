"""Build an HTML page with the episodes of a run. The page needs no network.

Episodes are data, compressed and in base64, that the page shows as text nodes. A content security policy
allows only the page's own script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from .files import Damage, read_episodes, read_updates
from .format import PER_TOKEN, TracedEpisode, TracedUpdate

# Joined in this order.
SCRIPTS = ("data", "state", "list", "colours", "tokens", "through", "episode", "main")
PREVIEW = 160
TAG = re.compile(r"<[^<>]{1,40}>")
# Texts per searched block.
TEXTS = 256
MAX_EPISODES = 2000


@dataclass(frozen=True)
class PageSummary:
    """Summary of a page: its path, its numbers of episodes and updates, damaged parts."""

    path: Path
    episodes: int  # on the page
    recorded: int  # in the trace
    updates: int  # rollout batches and evaluations
    damage: Damage


def build_page(
    run: str | Path, output: str | Path, *, max_episodes: int | None = MAX_EPISODES
) -> PageSummary:
    """Write the HTML page of a run's episodes atomically.

    Args:
        run: the run's `output_dir`, or the trace folder in it.
        output: the page.
        max_episodes: more episodes are sampled evenly from first to last; None for all.
    """
    damage = Damage()
    updates = read_updates(run, damage)
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{os.getpid()}.writing")
    try:
        with aside.open("w", encoding="utf-8") as page:
            summary = _write(page, Path(run), updates, max_episodes, damage)
        aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)
    return PageSummary(output, *summary, damage)


def _write(
    page: IO[str],
    run: Path,
    updates: list[tuple[TracedUpdate, Path]],
    limit: int | None,
    damage: Damage,
) -> tuple[int, int, int]:
    script = "\n".join(_template(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{ "use strict";\n{script}\n}})();'
    style = _template("page.css")
    recorded = sum(update.episodes for update, _ in updates)
    with tempfile.TemporaryFile("w+", encoding="ascii") as data:
        # Before the summary, which has the number of readable episodes.
        count = _write_blocks(data, updates, _evenly(recorded, limit), damage)
        inserted = {
            "policy": _policy(style, script),
            "title": html.escape(f"Episodes of {run.resolve().name}"),
            "style": style,
            "summary": _summary(updates, count, recorded, damage),
            "script": script,
        }
        before, _, after = _template("page.html").partition("{{data}}")
        page.write(_filled(before, inserted))
        data.seek(0)
        shutil.copyfileobj(data, page)
        page.write(_filled(after, inserted))
    return count, recorded, len(updates)


def _summary(
    updates: list[tuple[TracedUpdate, Path]], count: int, recorded: int, damage: Damage
) -> str:
    shown = f"{count} episodes" + (f" of {recorded}" if count < recorded else "")
    trained = len({update.update for update, _ in updates if update.phase == "train"})
    held = len(
        {(update.name, update.global_step) for update, _ in updates if update.phase == "eval"}
    )
    left_out = f"; {damage}" if damage else ""
    return f"{shown} from {_count(trained, 'update')} and {_count(held, 'evaluation')}{left_out}"


def _evenly(count: int, limit: int | None) -> set[int]:
    """Return at most `limit` positions, evenly spaced from the first to the last of `count` episodes."""
    if limit is None or count <= limit:
        return set(range(count))
    if limit == 1:
        return {count - 1}
    return {round(i * (count - 1) / (limit - 1)) for i in range(limit)}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _template(name: str) -> str:
    return (files(__package__) / "template" / name).read_text(encoding="utf-8")


def _filled(text: str, inserted: dict[str, str]) -> str:
    """Replace each {{name}} in a template. Inserted text is not searched for further names."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: inserted[name[1]], text)


def _policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy, which allows only this style and this script, by hash."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; "
        f"style-src 'sha256-{digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _write_blocks(
    data: IO[str], updates: list[tuple[TracedUpdate, Path]], wanted: set[int], damage: Damage
) -> int:
    """Write the page's data: episodes, their texts, their list. Return the number of episodes."""
    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    blocks = position = 0
    for group, (update, path) in enumerate(updates):
        # JSON in a browser has no numbers that are not finite: their names stay in their place.
        for episode in read_episodes(update, path, damage, parse_constant=str):
            position += 1
            if position - 1 not in wanted:
                continue
            # The messages repeat the tokens.
            shown = {**episode.to_json(), "prompt": None, "messages": None}
            shown |= {name: _rounded(shown[name]) for name in PER_TOKEN if shown[name]}
            data.write(_block(f"episode-{len(rows)}", shown))
            rows.append(_row(episode, group))
            texts.append("\n".join(filter(None, (episode.text, episode.error, episode.prompt_id))))
            if len(texts) == TEXTS:
                data.write(_block(f"texts-{blocks}", texts))
                blocks, texts = blocks + 1, []
    data.write(_block(f"texts-{blocks}", texts))
    heads = json.dumps([update.to_json() for update, _ in updates])
    heads = json.loads(heads, parse_constant=str)
    data.write(_block("list-data", {"rows": rows, "updates": heads, "text_blocks": blocks + 1}))
    return len(rows)


def _block(name: str, content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), default=str, allow_nan=False)
    packed = base64.b64encode(gzip.compress(text.encode("ascii"), mtime=0)).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>\n'


def _rounded(values: list[Any]) -> list[Any]:
    return [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]


def _row(episode: TracedEpisode, group: int) -> dict[str, Any]:
    """Return an episode's entry in the list."""
    pieces, first = episode.pieces, episode.prompt_tokens
    start, end = episode.turn_spans[-1] if episode.turn_spans else (0, 0)
    clipped = [flag for flag in episode.clipped or [] if flag is not None]
    last = episode.prompt[-1] if isinstance(episode.prompt, list) and episode.prompt else {}
    question = last.get("content") if isinstance(last, dict) else None
    if not isinstance(question, str):
        question = "".join(pieces[:first])
    return {
        "key": episode.key,
        "group": group,
        "row": episode.row,
        "environment": episode.environment,
        "success": episode.success,
        "score": episode.score,
        "turns": len(episode.turn_spans),
        "tokens": sum(end - start for start, end in episode.turn_spans),
        "stop": episode.stop_reason,
        "clipped": sum(clipped) / len(clipped) if clipped else 0.0,
        "question": _preview(question),
        "answer": _preview("".join(pieces[first + start : first + end])),
    }


def _preview(text: str) -> str:
    """Return the beginning of a text on one line, without tags."""
    return " ".join(TAG.sub(" ", text[: 4 * PREVIEW]).split())[:PREVIEW]
