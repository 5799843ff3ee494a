"""Greedy in float64, the engine plays what TRL's own tool loop plays, token for token."""

import asyncio
import copy
import random
import re
import time

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.kit.builders import QUICK, Keeps, quick_config
from tests.kit.tool_model import call, memorising_model, tool_tokenizer
from trl_stppo import PPOConfig, PPOTrainer
from trl_stppo.trainer.loop.sampler import TurnSampler


class NotesEnv:
    """Synchronous and asynchronous tools, some of which fail; pays by what was done."""

    pause = 0.0

    def reset(self, **row) -> str:
        self.turn_rewards = []
        self._done = []
        return f" Task {row['task']}."

    def look(self, place: str) -> str:
        """Look somewhere.\n\nArgs:\n    place: where."""
        time.sleep(self.pause * random.random())
        self._done.append(f"look {place}")
        self.turn_rewards.append(1.0)
        return f"You see the {place}, and nothing else of note."

    async def ask(self, question: str, times: int) -> str:
        """Ask somebody.\n\nArgs:\n    question: what.\n    times: how often."""
        await asyncio.sleep(self.pause * random.random())
        self._done.append(f"ask {question}")
        self.turn_rewards.append(0.5)
        return f"{question}? " * times

    def smash(self, thing: str) -> str:
        """Break something.\n\nArgs:\n    thing: what."""
        self.turn_rewards.append(-1.0)
        raise RuntimeError(f"the {thing} does not break")

    async def get_reward(self) -> float:
        return 10.0 + len(self._done)


SCRIPTS = [
    [call("look", place="shelf"), call("look", place="desk"), "All is in order."],
    [
        call("ask", question="who", times=2) + "\n" + call("look", place="hall"),
        call("smash", thing="vase") + "\n" + call("ask", question="why", times=1),
        call("look", place="yard") + "\n" + call("look", place="barn"),
        "It was the cook.",
    ],
    ["Nothing to do."],
    [call("jump", height=3) + "\n" + call("look", distance=3), call("ask", times=2), "Sorry."],
]
TURN_REWARDS = [[1.0, 1.0, 0.0], [1.5, -0.5, 2.0, 0.0], [0.0], [0.0, 0.0, 0.0]]
ROWS = {
    "prompt": [[{"role": "user", "content": "Look into it."}]] * len(SCRIPTS),
    "task": list(range(len(SCRIPTS))),
}
SIZES = {"max_completion_length": 400, "temperature": 1.0}


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """Tokenizer and model that has memorised SCRIPTS, as the engine renders them."""
    texts = [turn for script in SCRIPTS for turn in script]
    tokenizer = tool_tokenizer(texts)
    patch = pytest.MonkeyPatch()

    def scripted(self, prompt_ids, *args, **kwargs):
        said = []
        for text in self._tokenizer.batch_decode(prompt_ids):
            task = int(re.search(r"Task (\d)", text).group(1))
            turn = text.count("<|im_start|>assistant") - 1
            said.append(self._tokenizer(SCRIPTS[task][turn] + "<|im_end|>")["input_ids"])
        return said, None

    patch.setattr(GRPOTrainer, "_generate_single_turn", scripted)
    patch.setattr(TurnSampler, "why_not_cached", lambda self: "A script answers.")
    untrained = memorising_model(tokenizer, [[1, 2]], [[False, False]], steps=1)
    trainer = our_trainer(tmp_path_factory.mktemp("scripts"), (tokenizer, untrained))
    play(trainer, range(len(SCRIPTS)))
    patch.undo()
    rows = [e.prompt_ids + e.ids for e in trainer.episodes]
    masks = [[False] * len(e.prompt_ids) + e.action_mask for e in trainer.episodes]
    return tokenizer, memorising_model(tokenizer, rows, masks)


class Playing(Keeps, PPOTrainer):
    """Keeps its episodes."""


def made(agent, kind, args, **arguments):
    tokenizer, model = agent
    return kind(
        model=copy.deepcopy(model), args=args,
        train_dataset=Dataset.from_dict({k: v * 2 for k, v in ROWS.items()}),
        processing_class=copy.deepcopy(tokenizer), environment_factory=NotesEnv, **arguments,
    )  # fmt: skip


def our_trainer(folder, agent, **options):
    settings = {"generation_kwargs": {"do_sample": False}, **SIZES, **options}
    return made(agent, Playing, quick_config(folder, PPOConfig, **settings))


def trl_trainer(folder, agent, **options):
    skip = ("num_mini_batches", "num_ppo_epochs", "critic_learning_rate")
    settings = {key: value for key, value in QUICK.items() if key not in skip}
    settings |= {"num_generations": 2, "generation_kwargs": {"do_sample": False}}
    config = GRPOConfig(output_dir=str(folder), **{**settings, **SIZES, **options})
    return made(agent, GRPOTrainer, config, reward_funcs=[])


def play(trainer, tasks):
    """Ids, masks and rewards of a rollout of these tasks, in their order."""
    seen = {}
    original = type(trainer)._calculate_rewards

    def watch(self, *args, **kwargs):
        rewards = original(self, *args, **kwargs)
        seen["rewards"] = rewards[:, self.reward_func_names.index("NotesEnv")].tolist()
        return rewards

    patch = pytest.MonkeyPatch()
    patch.setattr(type(trainer), "_calculate_rewards", watch)
    rows = [{"prompt": ROWS["prompt"][task], "task": task} for task in tasks]
    trainer.model.train()
    batch = trainer._generate_and_score_completions(rows)
    patch.undo()
    result = []
    for i in range(len(rows)):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        keep = batch["completion_mask"][i].bool()
        ids, mask = batch["completion_ids"][i][keep].tolist(), batch["tool_mask"][i][keep].tolist()
        result.append((prompt, ids, mask, seen["rewards"][i]))
    return result


def test_the_model_has_learnt_its_scripts(agent, tmp_path):
    trainer = our_trainer(tmp_path, agent)
    play(trainer, range(4))
    for episode, script, earned in zip(trainer.episodes, SCRIPTS, TURN_REWARDS, strict=True):
        said = [trainer._tokenizer.decode(episode.ids[a:b]) for a, b in episode.turn_spans]
        assert said == [turn + "<|im_end|>" for turn in script]
        assert episode.turn_rewards == earned
        assert episode.stop_reason == "no_action"
    assert trainer.episodes[3].valid_actions == [False, False, True]
    calls = sum(episode.tool_calls for episode in trainer.episodes)
    assert (calls, sum(episode.tool_failures for episode in trainer.episodes)) == (11, 4)


@pytest.mark.parametrize("rounds", [None, 1])
def test_tokens_masks_and_rewards_are_those_of_trls_loop(agent, tmp_path, rounds):
    options = {"max_tool_calling_iterations": rounds}
    tasks = [0, 0, 1, 1, 2, 2, 3, 3]
    theirs = play(trl_trainer(tmp_path, agent, **options), tasks)
    assert play(our_trainer(tmp_path, agent, **options), tasks) == theirs


@pytest.mark.long
def test_messages_given_to_reward_functions_are_trls(agent, tmp_path):
    seen = []

    def watch(prompts, completions, completion_ids, environments, task, **kwargs):
        assert all(type(env) is NotesEnv for env in environments)
        seen.append((prompts, completions, completion_ids, task))
        return [0.0] * len(prompts)

    for make in (trl_trainer, our_trainer):
        trainer = make(tmp_path, agent)
        trainer.reward_funcs[0] = watch
        play(trainer, [0, 0, 1, 1])
    assert seen[0] == seen[1]


@pytest.fixture(scope="module")
def alone(agent, tmp_path_factory):
    """Each task's episode, played by itself."""
    folder = tmp_path_factory.mktemp("alone")
    return {task: play(our_trainer(folder, agent), [task])[0] for task in range(4)}


@pytest.mark.long
@pytest.mark.parametrize(("slots", "batch"), [(1, 5), (3, 12), (None, 1)])
def test_batch_slots_and_arrival_order_change_nothing(agent, alone, tmp_path, monkeypatch, slots, batch):
    monkeypatch.setattr(NotesEnv, "pause", 0.02)
    trainer = our_trainer(tmp_path, agent, generation_slots=slots)
    tasks = [(7 * i) % 4 for i in range(batch)]
    assert play(trainer, tasks) == [alone[task] for task in tasks]


@pytest.mark.long
def test_sampled_episodes_depend_on_the_seed_and_not_on_timing(agent, tmp_path, monkeypatch):
    def sampled(**options):
        options = {"generation_kwargs": {"do_sample": True}, "temperature": 1.5, **options}
        trainer = our_trainer(tmp_path, agent, **options)
        # The global generator plays no part.
        torch.manual_seed(random.randrange(1000))
        return play(trainer, [0, 1, 2, 3, 0, 1])

    first = sampled(seed=5)
    assert first[0] != first[4]
    monkeypatch.setattr(NotesEnv, "pause", 0.02)
    assert sampled(seed=5, generation_slots=2) == first
    assert sampled(seed=6) != first
