"""The best of several turns is played, by whoever judges them."""

import math

import pytest
import torch
from peft import LoraConfig

from tests.hub.hub_kit import letters, run, saved_base
from tests.kit.fakes import CountEnv, char_tokenizer
from trl_stppo import Agent
from trl_stppo.models.critic import SharedCritic
from trl_stppo.trainer.verifiers import CriticScores, published_critic

ROWS = [dict(row) for row in letters()][:4]
LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")


@pytest.fixture(scope="module", params=["separate", "shared"])
def saved(request, tmp_path_factory):
    """An agent with a critic that has learnt something, and so differs from state to state."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    arguments = {}
    if request.param == "shared":
        base = saved_base(tmp_path_factory.mktemp("base"))
        arguments = {"peft_config": LORA, "model": base, "processing_class": char_tokenizer()}
    options = {"critic_learning_rate": 0.05, "max_steps": 4}
    trainer = run(folder, hub_model_id=None, arguments=arguments, **options)
    trainer.train()
    trainer.save_model(str(folder))
    return folder, trainer


def capitals(prompts, completions, **columns):
    return [sum(c.isupper() for c in turn[0]["content"]) for turn in completions]


def test_the_candidate_that_is_scored_best_is_played(saved):
    agent, asked = Agent.from_pretrained(str(saved[0])), []

    def watch(prompts, completions, completion_ids, turn, **columns):
        asked.append((prompts, completions, completion_ids, turn, columns))
        return capitals(prompts, completions)

    episodes = agent.run_many(CountEnv, ROWS, candidates=3, verifier=watch, seed=2)
    again = agent.run_many(CountEnv, ROWS, candidates=3, verifier=capitals, seed=2, parallel=1)
    assert [e.ids for e in episodes] == [e.ids for e in again], "whoever else plays"
    by_context: dict[str, list] = {}
    for prompts, completions, ids, turns, _ in asked:
        for prompt, turn, each, number in zip(prompts, completions, ids, turns, strict=True):
            assert number == sum(m["role"] == "assistant" for m in prompt)
            by_context.setdefault(str(prompt), []).append((capitals([], [turn])[0], turn, each))
    played = 0
    for episode in episodes:
        for at, message in enumerate(episode.messages):
            if message["role"] != "assistant":
                continue
            candidates = by_context[str(episode.messages[:at])]
            assert len(candidates) == 3
            best = max(candidates, key=lambda c: c[0])  # of equal ones the first
            assert best[1] == [message]
            before = sum(m["role"] == "assistant" for m in episode.messages[:at])
            start, end = episode.turn_spans[before]
            assert episode.ids[start:end] == best[2]
            played += 1
    assert played >= 4
    assert {key for *_, columns in asked for key in columns} == set(ROWS[0]) - {"prompt"}


def test_the_agents_critic_says_what_it_would_in_training(saved):
    folder, trainer = saved
    agent = Agent.from_pretrained(str(folder))
    critic = published_critic(str(folder), agent.model)
    assert isinstance(critic, SharedCritic) == hasattr(trainer.model, "peft_config")
    seen, scores = [], CriticScores(critic, batch_size=3)

    def keep(turns):
        values = scores(turns)
        seen.extend(zip(turns, values, strict=True))
        return values

    verifier = agent.selection(2, critic, agent.sampling(False))
    object.__setattr__(verifier, "scores", keep)
    with agent.player(CountEnv, selection=verifier) as (player, _):
        player.play(ROWS, agent.sampling(False), (0,), names=[(i,) for i in range(4)])
    assert len({round(value, 6) for _, value in seen}) > 4
    for turn, value in seen:  # row by row, without padding, by the critic of the trainer
        row = torch.tensor([turn.before + turn.ids])
        with torch.no_grad(), trainer.critic.active():
            values = trainer.critic.values(row, torch.ones_like(row), len(turn.ids))
        at = max(1, len(turn.ids) - 1)
        assert value == pytest.approx(values[0, at].item(), abs=1e-4)


def test_by_the_critics_name(saved):
    agent = Agent.from_pretrained(str(saved[0]))
    before = agent.run_many(CountEnv, ROWS, seed=1, greedy=False)
    first = agent.run_many(CountEnv, ROWS, candidates=4, verifier="critic", seed=1)
    assert [e.ids for e in first] != [e.ids for e in before]
    again = agent.run_many(CountEnv, ROWS, candidates=4, verifier="critic", seed=1)
    assert [e.ids for e in first] == [e.ids for e in again]
    after = agent.run_many(CountEnv, ROWS, seed=1, greedy=False)
    assert [e.ids for e in after] == [e.ids for e in before], "the policy is what it was"


def test_by_a_models_name(saved, tmp_path):
    agent = Agent.from_pretrained(str(saved[0]))
    judge = Agent.from_pretrained(str(saved[0])).model
    judge = judge.merge_and_unload() if hasattr(judge, "peft_config") else judge
    judge.save_pretrained(tmp_path / "judge")
    char_tokenizer().save_pretrained(tmp_path / "judge")
    assert agent.run(CountEnv, ROWS[0], candidates=2, verifier=str(tmp_path / "judge")).turns


@pytest.mark.parametrize(("options", "match"), [
    ({"candidates": 2}, "`candidates=2` with `verifier=None`"),
    ({"verifier": capitals}, "`candidates=1` with `verifier="),
    ({"candidates": 2, "verifier": capitals, "greedy": True}, "would be the same turn"),
    ({"candidates": 2, "verifier": 3}, "`verifier` is 3; allowed are 'critic'"),
    ({"candidates": 2, "verifier": lambda prompts: [1]}, r"does not take .*`completions`"),
    ({"candidates": 2, "verifier": lambda turn, **_: [math.nan] * len(turn)}, "finite number"),
    ({"candidates": 2, "verifier": lambda **all_of_it: [1.0]}, "returned 1 rewards for"),
])  # fmt: skip
def test_what_is_refused(saved, options, match):
    agent = Agent.from_pretrained(str(saved[0]))
    with pytest.raises((ValueError, TypeError), match=match):
        agent.run_many(CountEnv, ROWS, **options)


def test_an_agent_without_its_critic(saved, tmp_path):
    agent = Agent.from_pretrained(str(saved[0]))
    unknown = Agent(agent.model, agent.tokenizer, agent.settings)
    with pytest.raises(FileNotFoundError, match=r"`verifier=.critic.`"):
        unknown.run(CountEnv, ROWS[0], candidates=2, verifier="critic")
    with pytest.raises(FileNotFoundError, match=r"there is no critic beside the policy"):
        published_critic(str(tmp_path), agent.model)
