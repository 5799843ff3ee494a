"""Agents in a training: equal to environments, resumable, evaluated, and reachable from other processes."""

import json
import socket
import subprocess
import sys
from typing import Any

import openai
import pytest
import torch

from tests.kit.builders import LIMITS, Kept, build, logs, prompts
from tests.kit.fakes import CountEnv
from trl_stppo import Agent, PPOTrainer, STGRPOTrainer, STPPOTrainer


def play_once(folder: Any, agent: Any) -> Any:
    """A trainer that has played one episode of an agent with an address."""
    trainer = build(
        folder, Kept, arguments={"agent": agent, "train_dataset": prompts(1)}, **LIMITS,
        max_steps=1, num_mini_batches=1, gradient_accumulation_steps=1, per_device_train_batch_size=1,
        agent_endpoint=True,
    )  # fmt: skip
    trainer.train()
    return trainer


class AtTheEnd(CountEnv):
    """Rewards the last turn alone."""

    def __init__(self) -> None:
        super().__init__(3)

    def step(self, action: str) -> Any:
        observation, _, done, *rest = super().step(action)
        return observation, sum(map(ord, action)) % 7 / 7 * done, done, *rest


def beginning(row: dict[str, Any]) -> tuple[AtTheEnd, list[dict[str, str]]]:
    env = AtTheEnd()
    (last,) = row["prompt"]
    return env, [{**last, "content": last["content"] + env.reset()[0]}]


async def counting(client: Any, row: dict[str, Any]) -> float:
    """Plays the same game by itself."""
    env, messages = beginning(row)
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        observation, reward, done, *_ = env.step(text)
        if done:
            return reward
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": observation},
        ]


async def compacting(client: Any, row: dict[str, Any]) -> float:
    """Begins anew after every second turn; what it got is its reward."""
    messages, score = list(row["prompt"]), 0.0
    for turn in range(4):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        score += sum(map(ord, text)) % 5 / 5
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        if turn % 2:
            messages = [{"role": "user", "content": f"so far: {text}"}]
    return score


def weights(trainer: Any) -> list[torch.Tensor]:
    return [
        *trainer.model.parameters(),
        *(trainer.critic.parameters() if trainer.has_critic else []),
    ]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), [
    (PPOTrainer, {"kl_coef": 0.05}),
    (STPPOTrainer, {"advantage_level": "turn", "num_ppo_epochs": 2}),
    (STGRPOTrainer, {"num_generations": 2}),
    (STPPOTrainer, {"rollout_overlap": True, "max_steps": 8}),
], ids=["PPO", "ST-PPO", "ST-GRPO", "overlapped"])  # fmt: skip
def test_an_agent_that_plays_an_environment_is_that_environment(tmp_path, kind, options):
    """Tokens, rewards and weights after three updates, bit for bit."""
    runs = []
    for name, source in (
        ("env", {"environment_factory": AtTheEnd}),
        ("agent", {"agent": counting}),
    ):
        arguments = {"reward_funcs": None, **source}
        settings = {"max_steps": 6, **LIMITS, **options}
        trainer = build(tmp_path / name, kind, arguments=arguments, **settings)
        trainer.train()
        runs.append(trainer)
    env, agent = runs
    assert max(abs(logs(env)["episode/score"]), logs(env)["policy/approx_kl"]) > 0
    for one, other in zip(weights(env), weights(agent), strict=True):
        assert torch.equal(one, other)
    # It reports neither successes nor invalid actions.
    timed = (
        "perf/",
        "sampling/",
        "contexts/",
        "step_time",
        "train_",
        "time",
        "episode/succ",
        "turns/valid",
    )
    for one, other in zip(env.state.log_history, agent.state.log_history, strict=True):
        same = {k: v for k, v in one.items() if not k.startswith(timed)}
        assert same == {k: v for k, v in other.items() if not k.startswith(timed)}


SEVERAL = {
    **LIMITS, "max_turns": 8, "max_steps": 8, "num_ppo_epochs": 2, "save_steps": 4,
    "save_strategy": "steps", "per_device_train_batch_size": 4,
}  # fmt: skip


@pytest.mark.long
def test_a_resumed_run_of_several_contexts_ends_as_the_uninterrupted_one(tmp_path):
    whole = build(tmp_path / "whole", Kept, arguments={"agent": compacting}, **SEVERAL)
    whole.train()
    assert {len(e.contexts) for e in whole.episodes} == {2}
    assert logs(whole)["contexts/rewritten"] == 1.0
    resumed = build(tmp_path / "resumed", Kept, arguments={"agent": compacting}, **SEVERAL)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for one, other in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(one, other)


def test_an_evaluation_and_a_saved_policy_play_the_same_episodes(tmp_path):
    arguments = {"agent": compacting, "eval_dataset": prompts(3)}
    options = {**LIMITS, "max_turns": 8, "eval_generation_kwargs": {"temperature": 0.0}}
    trainer = build(tmp_path, Kept, arguments=arguments, **options)
    figures = trainer.evaluate()
    assert figures["eval_turns/mean"] == 4.0
    assert "eval_turns/valid_action_rate" not in figures, "agents do not report it"
    trainer.save_model(str(tmp_path / "saved"))
    agent = Agent.from_pretrained(str(tmp_path / "saved"), device="cpu")
    rows = [dict(row) for row in prompts(3)]
    episodes = agent.run_many(None, rows, agent=compacting)
    assert [len(e.turns) for e in episodes] == [4] * 3
    mean = sum(e.score for e in episodes) / 3
    assert figures["eval_episode/score"] == pytest.approx(mean)


# ------------------------------------------------------------------------------ endpoint

ELSEWHERE = """
import json, sys, openai
address, key, row = sys.argv[1:]
client = openai.OpenAI(base_url=address, api_key=key)
messages = json.loads(row)["prompt"]
for turn in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, stream=bool(turn))
    if turn:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
print(len(text))
"""


def elsewhere(client: Any, row: dict[str, Any]) -> float:
    """The same in a process of its own."""
    command = [
        sys.executable,
        "-c",
        ELSEWHERE,
        str(client.base_url),
        client.api_key,
        json.dumps(row),
    ]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def here(client: Any, row: dict[str, Any]) -> float:
    messages = list(row["prompt"])
    for _ in range(2):
        text = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    return float(len(text))


@pytest.mark.long
def test_an_agent_in_another_process_is_one_in_this_process(tmp_path):
    runs = []
    for agent in (elsewhere, here):
        trainer = build(
            tmp_path / agent.__name__, Kept, arguments={"agent": agent, "train_dataset": prompts(4)},
            **{**LIMITS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
            num_mini_batches=1, max_steps=1, agent_endpoint=agent is elsewhere,
        )  # fmt: skip
        trainer.train()
        assert {str(e.stop_reason) for e in trainer.episodes} == {"terminated"}
        runs.append(trainer)
    assert [e.ids for e in runs[0].episodes] == [e.ids for e in runs[1].episodes]
    for one, other in zip(weights(runs[0]), weights(runs[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_an_address_is_open_to_the_secret_of_a_running_episode_alone(tmp_path):
    known: dict[str, Any] = {}

    def ask(key: str, size: int = 0) -> Any:
        client = openai.OpenAI(base_url=known["address"], api_key=key, max_retries=0)
        messages = [{"role": "user", "content": "x" * size or "hi"}]
        return client.chat.completions.create(model="policy", messages=messages)

    def agent(client: Any, row: dict[str, Any]) -> float:
        known.update(address=str(client.base_url), key=client.api_key)
        for key in ("wrong", client.api_key[:-1], "é"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                ask(key)
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client.api_key, size=65 * 2**20)
        assert caught.value.status_code == 413
        assert ask(client.api_key).choices[0].message.content
        return 1.0

    trainer = play_once(tmp_path, agent)
    assert [(str(e.stop_reason), e.error) for e in trainer.episodes] == [("terminated", None)]
    with pytest.raises(openai.AuthenticationError):
        ask(known["key"])
    port = int(known["address"].split(":")[2].split("/")[0])
    assert known["address"] == f"http://127.0.0.1:{port}/v1/"
    trainer._player.engine.close()
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
