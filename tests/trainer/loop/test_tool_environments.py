"""TRL's tool environments with per-turn rewards, with a scripted model."""

import json
import re
from pathlib import Path

import pytest
import torch
import trl
from transformers import Qwen2ForCausalLM
from trl import GRPOTrainer

from tests.kit.builders import Kept, build, logs, prompts
from tests.kit.fakes import char_tokenizer, tiny_config
from tests.kit.scripted import logged
from trl_stppo.trainer.loop.sampler import TurnSampler

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
LONG = "x" * 900


class PayingEnv:
    """Tools that pay; `turn_rewards` is what the rollout watches."""

    final = 10.0

    def reset(self, **row):
        self.turn_rewards = []

    def pay(self, amount: float) -> str:
        """Earn something.\n\nArgs:\n    amount: how much."""
        self.turn_rewards.append(amount)
        return "ok"

    def fail(self, amount: float) -> str:
        """Earn something, then break.\n\nArgs:\n    amount: how much."""
        self.turn_rewards.append(amount)
        raise RuntimeError("broken")

    def talk(self, amount: float) -> str:
        """Earn something and answer at too great a length.\n\nArgs:\n    amount: how much."""
        self.turn_rewards.append(amount)
        return LONG

    def get_reward(self) -> float:
        return self.final


def call(name: str, amount: float) -> str:
    body = json.dumps({"name": name, "arguments": {"amount": amount}})
    return f"<tool_call>\n{body}\n</tool_call>"


# What the model says, turn by turn, and what each turn earns.
SCRIPTS = [
    ([call("pay", 1.0) + "\n" + call("pay", 2.0), call("pay", 4.0), "done"], [3.0, 4.0, 0.0]),
    ([call("fail", 0.5), call("pay", 8.0) + "\n" + call("fail", 16.0), "done"], [0.5, 24.0, 0.0]),
    ([call("pay", 1.0), call("talk", 32.0)], [1.0, 32.0]),
    (["done"], [0.0]),
]


def said_by(says, number_of):
    """Instead of a model: what `says` gives for a number, turn by turn; `number_of` finds it in a prompt."""

    def scripted_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        ids = []
        for prompt in self._tokenizer.batch_decode(prompt_ids, skip_special_tokens=False):
            number = int(re.search(number_of, prompt).group(1))
            turn = prompt.count("<|im_start|>assistant") - 1
            ids.append(self._tokenizer(says(number)[turn] + "<|im_end|>")["input_ids"])
        return ids, None

    return scripted_turn


scripted_turn = said_by(lambda number: SCRIPTS[number % 4][0], r"say (\d)")


def tool_trainer(folder, monkeypatch, environment, given=None, *, kind=Kept, turn=scripted_turn, **options):
    """A trainer whose model is a script."""
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", turn)
    monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "A script answers.")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text()
    torch.manual_seed(0)
    arguments = {
        "processing_class": tokenizer,
        "model": Qwen2ForCausalLM(tiny_config(tokenizer, max_position_embeddings=8192)),
        "environment_factory": environment,
        "train_dataset": prompts(4),
        **(given or {}),
    }
    sizes = {"per_device_train_batch_size": 2, "max_completion_length": 800}
    return build(folder, kind, arguments=arguments, **{**sizes, "kl_coef": 0.0, **options})


def episodes(trainer):
    """Per episode of the first rollout: its number, turns as text, and the reward of each token."""
    _, batch, turns, _, estimates = trainer.kept[0]
    shown = trainer._tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=False)
    for b, prompt in enumerate(shown):
        number = int(re.search(r"say (\d)", prompt).group(1)) % 4
        index = turns.turn_index[b]
        said = [
            trainer._tokenizer.decode(batch["completion_ids"][b][index == k])
            for k in range(int(index.max()) + 1)
        ]
        yield number, said, index, estimates.rewards[b]


@pytest.mark.long
def test_rewards_land_on_the_last_token_of_the_turn_that_earned_them(tmp_path, monkeypatch):
    """Two tools in one turn, tools that fail, and a rollout that is cut."""
    trainer = tool_trainer(tmp_path, monkeypatch, PayingEnv)
    trainer.train()
    assert {number for number, *_ in episodes(trainer)} == {0, 1, 2, 3}
    for number, said, index, rewards in episodes(trainer):
        turns, earned = SCRIPTS[number]
        assert said == [turn + "<|im_end|>" for turn in turns]
        expected = torch.zeros_like(rewards)
        for k, amount in enumerate(earned):
            last = int((index == k).nonzero().max())
            expected[last] += amount
        expected[last] += PayingEnv.final
        assert torch.equal(rewards, expected)
    figures = logs(trainer)
    assert figures["turns/max"] == 3.0
    assert figures["tools/failure_frequency"] > 0
    earned = [sum(earned) + PayingEnv.final for _, earned in SCRIPTS]
    assert figures["episode/score"] == pytest.approx(sum(earned) / 4)


@pytest.mark.long
def test_a_malformed_call_and_a_turn_that_is_cut_are_no_valid_actions(tmp_path, monkeypatch):
    said = ["It is done.", '<tool_call>\n{"name": \n</tool_call>', "gibberish", "no end" * 200]
    turn = said_by(lambda number: [said[number % 4]], r"say (\d)")
    trainer = tool_trainer(tmp_path, monkeypatch, PayingEnv, turn=turn, max_steps=1)
    trainer.train()
    assert logged(trainer, "turns/valid_action_rate") == [0.5]
    assert logged(trainer, "stop_reason/no_action") == [0.75]
    assert logged(trainer, "stop_reason/token_budget") == [0.25]


@pytest.mark.long
def test_every_rollout_starts_counting_afresh(tmp_path, monkeypatch):
    trainer = tool_trainer(tmp_path, monkeypatch, PayingEnv, max_steps=4)
    trainer.train()
    assert len(trainer.kept) == 2
    first, second = ([sorted(k[4].rewards.sum(1).tolist())] for k in trainer.kept)
    assert first == second


@pytest.mark.long
def test_reward_functions_get_upstreams_arguments_and_no_others(tmp_path, monkeypatch):
    seen = []

    def watch(**arguments):
        seen.append(set(arguments))
        return [0.0] * len(arguments["prompts"])

    trainer = tool_trainer(tmp_path, monkeypatch, PayingEnv)
    trainer.reward_funcs[0] = watch
    trainer.train()
    always = {"prompts", "completions", "completion_ids", "trainer_state"}
    assert seen[0] == always | {"log_extra", "log_metric", "environments"}
