"""One reading of the tags: what a turn says, and that environment and rewards agree on it."""

import random

import pytest

from scripts.search.search_env import SearchEnv
from scripts.search.search_env.protocol import Turn, read_turn
from scripts.search.search_env.retrieval import Passage
from scripts.search.search_env.rewards import (
    exact_match_reward,
    final_answer,
    format_reward,
    multiple_choice_reward,
)

PIECES = ["<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>"]
PIECES += ["<information>", "</information>", "x", "A", " ", "\n", "<", "answer>", "alpha"]


class Anything:
    """Finds one passage."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        return [Passage("T", "text")]


def test_without_thoughts_their_tags_are_text():
    assert read_turn("<think><search><think></search>", thoughts=False) == Turn("search", "<think>")


def random_turn(dice: random.Random) -> str:
    """Any mixture of pieces, or a right turn with one more piece somewhere."""
    if dice.random() < 0.3:
        return "".join(dice.choices(PIECES, k=dice.randrange(9)))
    kind = dice.choice(["search", "answer"])
    turn = [*dice.choice([(), ("<think>", "x", "</think>"), ("x", "</think>")])]
    turn += [f"<{kind}>", dice.choice(["A", "x", "alpha"]), f"</{kind}>"]
    if dice.random() < 0.5:
        turn.insert(dice.randrange(len(turn) + 1), dice.choice(PIECES))
    return "".join(turn)


@pytest.mark.parametrize("row", [{}, {"choices": []}, {"choices": ["alpha", "beta"]}])
def test_the_environment_and_the_rewards_agree(row):
    """Episodes of random turns: what the one pays, the others pay, and what it refuses, none does."""
    dice, env = random.Random(0), SearchEnv(Anything(), metric="letter")
    seen = {"right": 0, "refused": 0, "tidy": 0}
    for _ in range(1200):
        env.reset(answers=["A"], **row)
        said, paid, ended = [], 0.0, False
        for _ in range(3):
            turn = random_turn(dice)
            _, reward, ended, _, info = env.step(turn)
            said.append({"role": "assistant", "content": turn})
            paid += reward
            tidy = format_reward([said[-1:]]) == [1.0]
            seen["refused"] += not info["valid_action"]
            seen["tidy"] += tidy
            assert info["valid_action"] or not tidy, turn
            assert (final_answer(said) is not None) is ended, turn
            if ended:
                break
        columns = {"answers": [["A"]], "choices": [row.get("choices")]}
        total = [f([said], **columns)[0] or 0.0 for f in (exact_match_reward, multiple_choice_reward)]
        assert sum(total) == paid, said
        seen["right"] += paid > 0
    assert min(seen.values()) > 100, seen
