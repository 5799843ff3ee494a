"""The relay study's credit of contexts, by hand, and its agents against scripted answers."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch

# Two episodes of contexts with one turn each: of 2 and 1 tokens, and of 1 token.
INDEX = torch.tensor([[0, 0, 1], [0, -1, -1]])
VALUES = torch.tensor([[0.5, 0.25, 0.5], [0.75, 9.0, 9.0]])
EARNED = torch.tensor([1.0, 2.0])


def test_every_context_ends_with_the_reward_of_its_episode(script):
    task = script("_relay_task")
    rewards = task.context_rewards(EARNED, INDEX, 1.0)
    assert rewards.tolist() == [[0.0, 1.0, 1.0], [2.0, 0.0, 0.0]]
    advantages, returns = task.context_gae(rewards, VALUES, INDEX, 1.0, 1.0)
    # The second context's value is not the first one's successor: 1 - V at each token.
    assert advantages.tolist() == [[0.5, 0.75, 0.5], [1.25, 0.0, 0.0]]
    assert returns.tolist() == [[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]]


def test_the_factor_counts_the_tokens_after_a_context(script):
    task = script("_relay_task")
    rewards = task.context_rewards(EARNED, INDEX, 0.5)
    # One token of the first episode follows its first context; none follows the others.
    assert rewards.tolist() == [[0.0, 0.5, 1.0], [2.0, 0.0, 0.0]]
    advantages, returns = task.context_gae(rewards, VALUES, INDEX, 1.0, 0.5)
    # Token 1: 0.5 - 0.25; token 0: (0.25 - 0.5) + 0.5 * 0.25; token 2: 1 - 0.5.
    assert advantages.tolist() == [[-0.125, 0.25, 0.5], [1.25, 0.0, 0.0]]
    assert returns.tolist() == [[0.375, 0.5, 1.0], [2.0, 0.0, 0.0]]


def test_values_that_equal_the_returns_explain_all_of_them(script):
    explained = script("_relay_task").explained
    returns = torch.tensor([0.0, 1.0, 1.0])
    assert explained(returns, returns) == 1.0
    assert explained(torch.full((3,), 0.7), returns) == pytest.approx(0.0)


class Scripted:
    """A client whose policy copies the code that it reads, or carries its note; `forgets` one call."""

    def __init__(self, forgets: int | None = None) -> None:
        self.asked, self._forgets = list[str](), forgets
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, model: str, messages: list[dict[str, str]]) -> SimpleNamespace:
        text = messages[0]["content"]
        self.asked.append(text)
        source = text.split("code")[1] if "code" in text else text.removeprefix("note")
        answer = "f0f0" if len(self.asked) - 1 == self._forgets else source[:4]
        message = SimpleNamespace(content=answer)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.mark.parametrize("forgets", [None, 0, 4, 9])
def test_the_code_stands_on_the_first_page_and_is_asked_for_at_the_end(script, forgets):
    task, client = script("_relay_task"), Scripted(forgets)
    result = asyncio.run(task.relay(client, {"seed": 3}))
    assert result == {"reward": float(forgets is None), "success": forgets is None}
    assert ["code" in text for text in client.asked] == [True] + [False] * (task.PAGES + 1)
    code = task.codes(random.Random(3))
    assert forgets is not None or all(f"note{code}" in text for text in client.asked[1:])


def test_each_fact_is_paid_when_it_is_asked_for(script):
    task, client = script("_relay_task"), Scripted(forgets=2)
    result = asyncio.run(task.facts(client, {"seed": 3}))
    paid = [reward * task.PAGES for reward in result["turn_rewards"]]
    assert paid == [0.0, 1.0, 0.0, 0.0] + [0.0, 1.0] * (task.PAGES - 2)
    assert not result["success"]
