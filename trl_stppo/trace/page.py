"""Write one HTML page of a run's recorded episodes.

The page needs no network. It filters and sorts the recorded episodes
(--trace_episodes of `train`), and colours each token by role, ratio,
advantage, value, or clipping (docs/watching.md). Episodes are data, compressed
and in base64, that the page shows as text nodes. A content security policy
allows only the page's own script.

Examples:
    trl-stppo trace runs/demo --open
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import html
import json
import os
import re
import webbrowser
from pathlib import Path
from typing import IO, Any

from .files import PER_TOKEN, TracedEpisode, TracedUpdate, read_episodes, read_updates

SCRIPTS = ("data", "state", "list", "colours", "tokens", "through", "episode", "main")
PREVIEW = 160
TAG = re.compile(r"<[^<>]{1,40}>")
MAX_EPISODES = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `trace` to the parser."""
    parser.add_argument("run", metavar="RUN", help="output_dir of a run, or the trace folder in it")
    parser.add_argument("--output", metavar="PAGE", help="the page; default RUN/trace.html")
    about = f"at most N episodes, evenly from first to last; default {MAX_EPISODES}, 0 for all"
    parser.add_argument("--max_episodes", type=int, default=MAX_EPISODES, metavar="N", help=about)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(options: argparse.Namespace) -> int:
    """Write the HTML page of a run's episodes; return the exit code."""
    folder = Path(options.run)
    output = Path(options.output) if options.output else folder / "trace.html"
    try:
        shown, recorded = build_page(folder, output, max_episodes=max(0, options.max_episodes) or None)
    except OSError as error:
        raise OSError(f"`--output {output}` cannot be written: {error}.") from error
    of = f" of {recorded}" if shown < recorded else ""
    print(f"{output}: {shown}{of} episodes, {output.stat().st_size / 2**20:.1f} MiB")
    if options.open:
        webbrowser.open(output.resolve().as_uri())
    return 0


def build_page(
    run: str | Path, output: str | Path, *, max_episodes: int | None = MAX_EPISODES
) -> tuple[int, int]:
    """Write the HTML page of a run's episodes atomically; return how many episodes it shows and the run has.

    `run` is the run's `output_dir`, or the trace folder in it. If there are more than `max_episodes`, so many
    are sampled evenly from first to last.
    """
    run, output = Path(run), Path(output)
    updates = read_updates(run)
    recorded = sum(update.episodes for update, _ in updates)
    few = min(recorded, max_episodes or recorded)
    wanted = {round(i * (recorded - 1) / max(1, few - 1)) for i in range(few)}
    trained = {head.update for head, _ in updates if head.phase == "train"}
    held = {(head.name, head.global_step) for head, _ in updates if head.phase == "eval"}
    counts = {"update": len(trained), "evaluation": len(held)}
    named = [f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items()]
    shown = f"{few} episodes" + (f" of {recorded}" if few < recorded else "")
    before, after = _frame(f"Episodes of {run.resolve().name}", f"{shown} from {' and '.join(named)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{os.getpid()}.writing")
    try:
        with aside.open("w", encoding="utf-8") as page:
            page.write(before)
            count = _write_blocks(page, updates, wanted)
            page.write(after)
        aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)
    return count, recorded


def _frame(title: str, summary: str) -> tuple[str, str]:
    """Return the page before and after its data."""

    def template(name: str) -> str:
        return (Path(__file__).parent / "template" / name).read_text(encoding="utf-8")

    script = "\n".join(template(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{ "use strict";\n{script}\n}})();'
    style = template("page.css")
    inserted = {"policy": _policy(script, style), "style": style, "script": script}
    inserted |= {"title": html.escape(title), "summary": summary}
    # Inserted text is not searched for further names.
    before, after = (
        re.sub(r"\{\{(\w+)\}\}", lambda name: inserted[name[1]], part)
        for part in template("page.html").split("{{data}}")
    )
    return before, after


def _policy(*texts: str) -> str:
    """Return the Content-Security-Policy, which allows only this script and this style, by hash."""
    hashes = (hashlib.sha256(text.encode()).digest() for text in texts)
    script, style = (base64.b64encode(each).decode() for each in hashes)
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _write_blocks(page: IO[str], updates: list[tuple[TracedUpdate, Path]], wanted: set[int]) -> int:
    """Write the page's data: episodes, their texts, their list. Return the number of episodes."""
    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    position = 0
    for group, (update, path) in enumerate(updates):
        # Keep NaN and infinity as text, because JSON in a browser has no such numbers.
        for episode in read_episodes(update, path, parse_constant=str):
            position += 1
            if position - 1 not in wanted:
                continue
            shown = {**episode.to_json(), "prompt": None, "messages": None}
            shown |= {name: _rounded(shown[name]) for name in PER_TOKEN if shown[name]}
            page.write(_block(f"episode-{len(rows)}", shown))
            texts.append("\n".join(filter(None, (episode.text, episode.error, episode.prompt_id))))
            rows.append(_row(episode, group))
    heads = json.dumps([update.to_json() for update, _ in updates])
    heads = json.loads(heads, parse_constant=str)
    page.write(_block("texts", texts))
    page.write(_block("list-data", {"rows": rows, "updates": heads}))
    return len(rows)


def _block(name: str, content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), default=str, allow_nan=False)
    packed = base64.b64encode(gzip.compress(text.encode("ascii"), mtime=0)).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>\n'


def _rounded(values: list[Any]) -> list[Any]:
    return [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]


def _row(episode: TracedEpisode, group: int) -> dict[str, Any]:
    """Return an episode's entry in the page's list of episodes."""
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
        "repetition": episode.repetition,
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
