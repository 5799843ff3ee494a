"""Made-up traces of any size, hostile ones too."""

import math
from pathlib import Path
from typing import Any

from trl_stppo.trace import TracedEpisode, TracedUpdate
from trl_stppo.trace.files import FOLDER, write_update

WORDS = (
    *("which", "class", "defines", "the", "method", "search", "read", "answer", "module"),
    *("of", "library", "is", "in", "found", "no", "result"),
)
# What a page must show as text and never obey.
HOSTILE = [
    "</script><script>alert('script')</script>", "<img src=x onerror=alert('image')>",
    "\"><svg onload=alert('svg')>", "{{data}}{{script}}", "</style><!--",
    "\u202eturned around\u2066", "\x00\x01\x1b[31m\x7f\x85", "\u2028\u2029\ufeff", "\ud83d",
    "👩\u200d💻👨\u200d👩\u200d👧", "a" * 100_000,
]  # fmt: skip


def figures(length: int) -> dict[str, Any]:
    """Per-token figures of one turn."""
    some = [math.sin(i) for i in range(length)]
    return {
        "loss_mask": [True] * length, "old_logprobs": [-abs(x) for x in some],
        "token_log_ratio": some, "log_ratio": some, "advantages": some,
        "values": some, "returns": some, "clipped": [x > math.log(1.2) for x in some],
    }  # fmt: skip


def episode(update: TracedUpdate, row: int, **changes: Any) -> TracedEpisode:
    """An episode of two turns, of which the second has no figures."""
    pieces = [f" {word}" for word in WORDS]
    unknown = dict.fromkeys(figures(0), [None] * (len(pieces) - 5))
    values = {
        "prompt_id": f"question-{row}", "columns": {"answers": ["the answer", "another"]},
        "environment": "SearchEnv", "pieces": ["<|im_start|>", f" {row}", "\n", *pieces],
        "token_ids": list(range(3 + len(pieces))), "prompt_tokens": 3, "turn_spans": [(0, 5), (8, 10)],
        **{name: known + unknown[name] for name, known in figures(5).items()},
        "steps": {"taken": 4}, "turn_rewards": [0.0, 1.0], "rewards": {"correct": 1.0},
        "score": 1.0, "success": True, "terminated": True, "stop_reason": "terminated",
    }  # fmt: skip
    return TracedEpisode(update, row, **{**values, **changes})


def hostile(update: TracedUpdate, row: int) -> TracedEpisode:
    """Everything a page could stumble over, in every text that it shows."""
    text = "".join(HOSTILE[:9])
    pieces = ["prompt ", *HOSTILE, "", "end\n\n"]
    length = len(pieces) - 1
    return episode(
        update, row, pieces=pieces, token_ids=list(range(len(pieces))), prompt_tokens=1,
        turn_spans=[(0, length)], **figures(length), environment=text,
        stop_reason=text, error=text, prompt_id=text, columns={text: text},
        rewards={text: math.nan}, score=math.inf, turn_rewards=[-math.inf],
        pictures=["<svg onload='alert(1)'><script>alert('picture')</script><rect/></svg>", text],
    )  # fmt: skip


def made_up_run(folder: Path, updates: int = 4, per_update: int = 3) -> Path:
    """A run's folder with so many episodes; every tenth update has an evaluation behind it."""
    for number in range(1, updates + 1):
        about = {
            "trainer": "ST-PPO", "variant": "st-ppo", "level": "turn", "episodes": per_update,
        }  # fmt: skip
        update = TracedUpdate("train", "train", number, 8 * (number - 1), **about)
        made = [episode(update, row) for row in range(per_update)]
        write_update(folder / FOLDER, update, [one.to_json() for one in made])
        if number % 10 == 0:
            held = TracedUpdate("eval", "eval", number, 8 * number, **about)
            unused = dict.fromkeys(("clipped", "log_ratio", "token_log_ratio"))
            made = [episode(held, row, steps={}, **unused) for row in range(per_update)]
            write_update(folder / FOLDER, held, [one.to_json() for one in made])
    return folder


def add_hostile(folder: Path, number: int) -> TracedEpisode:
    """One more update, with nothing but the hostile episode."""
    update = TracedUpdate("train", "train", number, 8 * number, episodes=1)
    made = hostile(update, 0)
    write_update(folder / FOLDER, update, [made.to_json()])
    return made
