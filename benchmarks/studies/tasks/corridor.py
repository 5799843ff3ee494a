"""A corridor of seven rooms with three doors each, whose reward comes at the end.

The prompt names a colour. In every room the agent says what it looks for and which door it takes; the reward
is 1 after seven right doors. One mistake is enough to fail, and nothing says so before the end.
"""

from __future__ import annotations

import random
from typing import Any

from _task import Messages, Row, Task, sft, taught
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer

COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "gold")
DOORS = ("left", "middle", "right")
ROOMS = 7
# The share of wrong doors in demonstrations: 0.8 ** 7 is a success of 0.21.
MISTAKES = 0.2
BATCH = 32
# Rows of different kinds start at different seeds, so that they share no rooms.
TRAIN, HELD_OUT, TAUGHT = 0, 10**6, 2 * 10**6


class CorridorEnv:
    """Seven rooms; reward 1 at the end for seven right doors, else 0."""

    def reset(self, *, seed: int, colour: str, **row: Any) -> tuple[str, dict[str, Any]]:
        """Show the first room; the prompt has named the colour."""
        self._dice, self._colour = random.Random(seed), colour
        self._room, self._right = 0, True
        return " " + self._enter(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Go through a door; an action that cannot be read is a wrong one."""
        words = action.split()
        valid = len(words) == 4 and words[:2] == ["i", "seek"] and words[3] in DOORS
        self._right = self._right and words == ["i", "seek", self._colour, self.right_door]
        self._room += 1
        info: dict[str, Any] = {"valid_action": valid}
        if self._room == ROOMS:
            return "", float(self._right), True, False, {**info, "success": self._right}
        return self._enter(), 0.0, False, False, info

    def _enter(self) -> str:
        others = [colour for colour in COLOURS if colour != self._colour]
        self._doors = [self._colour, *self._dice.sample(others, len(DOORS) - 1)]
        self._dice.shuffle(self._doors)
        return "doors " + " ".join(f"{c} {d}" for c, d in zip(self._doors, DOORS, strict=True))

    @property
    def right_door(self) -> str:
        """The door of the colour."""
        return DOORS[self._doors.index(self._colour)]


def rows(count: int, first_seed: int) -> list[Row]:
    """Make rows; each seed has rooms of its own."""
    made = []
    for seed in range(first_seed, first_seed + count):
        colour = COLOURS[seed % len(COLOURS)]
        prompt = [{"role": "user", "content": f"find {colour}"}]
        made.append({"prompt": prompt, "seed": seed, "colour": colour})
    return made


def demonstration(row: Row, mistakes: float) -> Messages:
    """Play an episode with this share of wrong doors."""
    env, dice = CorridorEnv(), random.Random(row["seed"])
    observation, _ = env.reset(**row)
    messages = [{"role": "user", "content": row["prompt"][0]["content"] + observation}]
    over = False
    while not over:
        wrong = [door for door in DOORS if door != env.right_door]
        door = dice.choice(wrong) if dice.random() < mistakes else env.right_door
        action = f"i seek {row['colour']} {door}"
        observation, _, over, _, _ = env.step(action)
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "user", "content": observation})
    return messages[:-1]


def teach(number: int, steps: int) -> tuple[Any, Any]:
    """Teach the agent: right doors first, so that it finds what a door has to do with the colour."""
    set_seed(number)
    lessons = [
        demonstration(row, MISTAKES if i > 0.6 * steps * BATCH else 0.0)
        for i, row in enumerate(rows(steps * BATCH, TAUGHT))
    ]
    texts = [message["content"] for messages in lessons[:200] for message in messages]
    tokenizer = tiny_tokenizer(texts, vocab_size=320)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes, num_key_value_heads=4))
    sft(model, tokenizer, lessons, BATCH)
    return model, tokenizer


TASKS = {
    "corridor": Task(
        agent=taught("corridor", teach, steps=1000),
        rows=lambda *_: rows(4096, TRAIN),
        player={"environment_factory": CorridorEnv},
        args={
            "learning_rate": 3e-4,
            "max_turns": ROOMS,
            "max_turn_tokens": 10,
            "max_completion_length": 128,
        },
        critic={"critic_learning_rate": 1e-3},
        held_out=lambda *_: rows(256, HELD_OUT),
    )
}
