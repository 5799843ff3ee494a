"""Agents that carry facts through contexts by notes.

Each call's messages replace the last call's, so a context has one turn, and the agent knows what its
last note says.

relay: a code stands on the first of nine pages, and is asked for at the end.
relay-facts: a code on each of eight pages is asked for after that page.
relay-swaps: relay with an agent a third of whose mistakes are another code.
"""

from __future__ import annotations

import math
import random
from typing import Any

from _task import Messages, Row, Task, imitate, taught
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer

# Pages after the one with the code.
PAGES = 8
SYMBOLS, FILLERS = [f"s{n}" for n in range(6)], [f"f{n}" for n in range(6)]
WORDS = ["note", "none", "page", "code", "ask", *map(str, range(PAGES + 1)), *SYMBOLS, *FILLERS]
# Tokens of a page, of a context, of a turn.
PAGE, CONTEXT, NOTE = 17, 32, 4
# The share of the demonstrations that is careless.
MISTAKES = 0.25


def codes(dice: random.Random) -> str:
    """Draw two symbols."""
    return "".join(dice.choices(SYMBOLS, k=2))


def page(number: int, dice: random.Random, code: str | None) -> str:
    """Write a numbered page of PAGE tokens; the code, if there is one, is somewhere on it."""
    words = [dice.choice(FILLERS) for _ in range(PAGE - 2)]
    if code is not None:
        place = dice.randrange(PAGE - 4)
        words[place : place + 3] = ["code", code]
    return f"page{number}" + "".join(words)


def prompt(note: str, after: str) -> Messages:
    """Return the whole context of a call."""
    return [{"role": "user", "content": f"note{note or 'none'}{after}"}]


async def say(client: Any, note: str, after: str) -> str:
    """Return the policy's turn."""
    messages = prompt(note, after)
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return str(answer.choices[0].message.content)


async def relay(client: Any, row: Row) -> dict[str, Any]:
    """Play a code on the first of PAGES + 1 pages, a note after each, the code at the end; reward 1 or 0."""
    dice = random.Random(row["seed"])
    code = codes(dice)
    note = "none"
    for number in range(PAGES + 1):
        note = await say(client, note, page(number, dice, None if number else code))
    reward = float(await say(client, note, "ask") == code)
    return {"reward": reward, "success": reward == 1.0}


async def facts(client: Any, row: Row) -> dict[str, Any]:
    """Play a fact on each of PAGES pages, asked for after it; each right answer has a share of the reward."""
    dice, rewards = random.Random(row["seed"]), list[float]()
    note = "none"
    for number in range(PAGES):
        code = codes(dice)
        note = await say(client, note, page(number + 1, dice, code))
        rewards += [0.0, float(await say(client, note, "ask") == code) / PAGES]
    return {"turn_rewards": rewards, "success": sum(rewards) > 0.999}


def lesson(dice: random.Random, swaps: float) -> Messages:
    """Make a call and a careless answer.

    A mistake is two words such as pages have, or another code, with a share of `swaps`.
    """
    note = codes(dice) if dice.random() < 0.7 else "".join(dice.choices(FILLERS, k=2))
    shown, after = note, "ask"
    if (kind := dice.random()) < 0.8:
        fresh = codes(dice) if kind < 0.3 else None
        note = "none" if kind < 0.15 else note
        after = page(dice.randrange(PAGES + 1), dice, fresh)
        shown = fresh or note
    if dice.random() < MISTAKES:
        swapped = dice.random() < swaps
        shown = codes(dice) if swapped else "".join(dice.choices(FILLERS, k=2))
    return [*prompt(note, after), {"role": "assistant", "content": shown}]


def teach(number: int, steps: int, swaps: float = 0.0) -> tuple[Any, Any]:
    """Teach the agent of a number."""
    set_seed(number)
    dice = random.Random(number)
    tokenizer = tiny_tokenizer(WORDS, vocab_size=300, markers=WORDS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes, initializer_range=0.1))
    lessons = ([lesson(dice, swaps) for _ in range(128)] for _ in range(steps))
    cosine = (2e-4 + 2.4e-3 * (1 + math.cos(math.pi * step / steps)) for step in range(steps))
    imitate(model, tokenizer, lessons, cosine)
    return model, tokenizer


def task(name: str, agent: Any, swaps: float = 0.0) -> Task:
    """Return a task of this kind; each seed has an agent of its own."""
    begin = [{"role": "user", "content": "relay"}]
    return Task(
        agent=taught(name, lambda *numbers: teach(*numbers, swaps), steps=500),
        rows=lambda *_: [{"prompt": begin, "seed": 10**6 + n} for n in range(64 * 64)],
        player={"agent": agent},
        args={
            "learning_rate": 5e-4,
            "num_iterations": 1,
            "max_turns": 2 * PAGES,
            "max_turn_tokens": NOTE,
            "max_completion_length": 2 * NOTE,
        },
        critic={"critic_learning_rate": 3e-3, "critic_warmup_steps": 8},
        episodes=64,
        rollouts=48,
        group=8,
        measure="reward",
        agents=100,
    )


TASKS = {
    "relay": task("relay", relay),
    "relay-facts": task("relay", facts),
    "relay-swaps": task("relay-swaps", relay, swaps=0.33),
}
