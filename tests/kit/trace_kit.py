"""Made-up traces of any size, hostile ones too."""

import math
import random
from pathlib import Path
from typing import Any

from trl_stppo.trace import TracedEpisode, TracedUpdate
from trl_stppo.trace.files import FOLDER, write_update

WORDS = (
    *("which", "class", "defines", "the", "method", "search", "read", "answer", "module"),
    *("of", "library", "is", "in", "found", "no", "result"),
)
ENDS = ("terminated", "max_turns", "token_budget", "env_error")
# What a page must show as text and never obey.
HOSTILE = [
    "</script><script>alert('script')</script>", "<img src=x onerror=alert('image')>",
    "\"><svg onload=alert('svg')>", "{{data}}{{script}}", "</style><!--",
    "\u202eturned around\u2066", "\x00\x01\x1b[31m\x7f\x85", "\u2028\u2029\ufeff", "\ud83d",
    "👩\u200d💻👨\u200d👩\u200d👧", "a" * 100_000,
]  # fmt: skip


def figures(draw: random.Random, spans: list[tuple[int, int]], length: int) -> dict[str, Any]:
    """Per-token figures inside the turns."""
    inside = [any(start <= i < end for start, end in spans) for i in range(length)]

    def some(spread: float, middle: float = 0.0) -> list[float | None]:
        return [draw.gauss(middle, spread) if there else None for there in inside]

    ratio = some(0.15)
    return {
        "loss_mask": inside,
        "old_logprobs": [None if x is None else -abs(x) for x in some(1.5)],
        "token_log_ratio": ratio, "log_ratio": ratio, "advantages": some(1.0),
        "values": some(0.2, 0.4), "returns": some(0.3, 0.5),
        "clipped": [None if x is None else abs(x) > math.log(1.2) for x in ratio],
    }  # fmt: skip


def episode(update: TracedUpdate, row: int, draw: random.Random, **changes: Any) -> TracedEpisode:
    """An episode of one to five turns."""
    prompt = ["<|im_start|>", *(f" {draw.choice(WORDS)}" for _ in range(40)), "\n"]
    pieces, spans = [], []
    for turn in range(draw.randint(1, 5)):
        said = [f" {draw.choice(WORDS)}" for _ in range(draw.randint(8, 30))]
        spans.append((len(pieces), len(pieces) + len(said)))
        pieces += said
        if turn < 4:
            pieces += ["\n", *(f" {draw.choice(WORDS)}" for _ in range(draw.randint(10, 50)))]
    success = draw.random() < 0.2 + 0.5 * update.update / 250
    rewards = [0.0] * (len(spans) - 1) + [float(success)]
    values = {
        "prompt_id": f"question-{row}",
        "columns": {"answers": ["the answer", "another"], "hops": 2},
        "environment": draw.choice(["SearchEnv", "ToolEnv"]), "pieces": prompt + pieces,
        "token_ids": [draw.randrange(50_000) for _ in prompt + pieces],
        "prompt_tokens": len(prompt), "turn_spans": spans, **figures(draw, spans, len(pieces)),
        "steps": {"taken": 4}, "turn_rewards": rewards, "rewards": {"correct": float(success)},
        "score": sum(rewards), "success": success, "terminated": True,
        "stop_reason": draw.choice(ENDS),
    }  # fmt: skip
    return TracedEpisode(update, row, **{**values, **changes})


def hostile(update: TracedUpdate, row: int) -> TracedEpisode:
    """Everything a page could stumble over, in every text that it shows."""
    text = "".join(HOSTILE[:9])
    pieces = ["prompt ", *HOSTILE, "", "end\n\n"]
    length = len(pieces) - 1
    draw = random.Random(0)
    return episode(
        update, row, draw, pieces=pieces, token_ids=list(range(len(pieces))), prompt_tokens=1,
        turn_spans=[(0, length)], **figures(draw, [(0, length)], length), environment=text,
        stop_reason=text, error=text, prompt_id=text, columns={text: text},
        rewards={text: math.nan}, score=math.inf, turn_rewards=[-math.inf],
        pictures=["<svg onload='alert(1)'><script>alert('picture')</script><rect/></svg>", text],
    )  # fmt: skip


def made_up_run(folder: Path, updates: int = 4, per_update: int = 3, **changes: Any) -> Path:
    """A run's folder with so many episodes; every tenth update has an evaluation behind it."""
    draw = random.Random(7)
    for number in range(1, updates + 1):
        about = {
            "trainer": "ST-PPO", "variant": "st-ppo", "level": "turn", "episodes": per_update,
        }  # fmt: skip
        update = TracedUpdate("train", "train", number, 8 * (number - 1), **about)
        made = [episode(update, row, draw, **changes) for row in range(per_update)]
        write_update(folder / FOLDER, update, [one.to_json() for one in made])
        if number % 10 == 0:
            held = TracedUpdate("eval", "eval", number, 8 * number, **about)
            unused = dict.fromkeys(("clipped", "log_ratio", "token_log_ratio"))
            made = [episode(held, row, draw, steps={}, **unused) for row in range(per_update)]
            write_update(folder / FOLDER, held, [one.to_json() for one in made])
    return folder


def add_hostile(folder: Path, number: int) -> TracedEpisode:
    """One more update, with nothing but the hostile episode."""
    update = TracedUpdate("train", "train", number, 8 * number, episodes=1)
    made = hostile(update, 0)
    write_update(folder / FOLDER, update, [made.to_json()])
    return made
