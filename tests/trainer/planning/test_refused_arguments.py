"""Arguments that cannot work are refused with the name of the argument to change."""

import functools
import inspect
import math
import re

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Qwen2ForSequenceClassification,
    Qwen2Model,
)
from trl import GRPOConfig

from tests.hub.hub_kit import saved_base
from tests.kit.builders import build, prompts, share_of_a
from tests.kit.fakes import (
    CountEnv,
    char_tokenizer,
    tiny_config,
    tiny_policy,
    tiny_value_model,
)
from trl_stppo import PPOConfig, STPPOTrainer

TOKENIZER = char_tokenizer()
MESSAGE = {"role": "user", "content": "hi"}
PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none"}


class NoReset:
    def step(self, action: str):
        return "", 0.0, True, False, {}


class Untold:
    """A tool environment whose tool has no description."""

    def reset(self, **row):
        return ""

    def look(self, where):
        return where

    def get_reward(self):
        return 1.0


class ToolEnv(Untold):
    def look(self, word: str) -> str:
        """Look a word up.\n\nArgs:\n    word: the word."""
        return word


def find(word: str, *more: str) -> str:
    """Find.\n\nArgs:\n    word: a word.\n    more: others."""
    return word


def look(word: str) -> str:
    """Look.\n\nArgs:\n    word: a word."""
    return word


def untold(word: str) -> str:
    return word


def unhinted(word) -> str:
    """Look.\n\nArgs:\n    word: a word."""
    return word


class Callable:
    def __call__(self, word: str) -> str:
        """Look.\n\nArgs:\n    word: a word."""
        return word


def without(name: str):
    tokenizer = char_tokenizer()
    setattr(tokenizer, name, None)
    return tokenizer


def grown():
    """A tokenizer with one token more than its model."""
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["<new>"])
    return tokenizer


class Images(ProcessorMixin):
    def __init__(self):
        pass


def value_model():
    return tiny_value_model(TOKENIZER)


def headless():
    return Qwen2Model(tiny_config(TOKENIZER))


def two_labels():
    return Qwen2ForSequenceClassification(tiny_config(TOKENIZER, num_labels=2))


def lora_policy(**changes):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}
    return get_peft_model(tiny_policy(TOKENIZER), LoraConfig(**settings))


def rewarded(value, name="mine"):
    """A reward function that returns a value, or what a function makes of the number of completions."""

    def func(completions, **kwargs):
        return value(len(completions)) if callable(value) else value

    func.__name__ = name
    return func


def lists(number):
    return [[1.0, 2.0]] * number


async def one_later(completions, **kwargs):
    return 1.0


def needs_answer(completions, answer, **kwargs):
    return [1.0] * len(completions)


async def needs_answer_later(completions, *, answer, **kwargs):
    return [1.0] * len(completions)


def takes_little(prompts, completions):
    return [1.0] * len(completions)


def rollout(prompts, trainer=None, **changes):
    ids = [[5, 6]] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None, **changes}


def too_few(prompts, trainer):
    return rollout(prompts[1:])


def short_mask(prompts, trainer):
    return rollout(prompts, env_mask=[[1]] * len(prompts))


def rows(**columns):
    return Dataset.from_dict({name: [value] * 8 for name, value in columns.items()})


EMPTY = Dataset.from_dict({"prompt": []})
DICT = rows(prompt=MESSAGE)
COUNT = {"environment_factory": CountEnv}
IA3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
ARGUMENTS = inspect.signature(STPPOTrainer.__init__).parameters
# Settings that turns alone have.
NEED_TURNS = ("max_turns", "max_turn_tokens", "max_images", "generation_slots")
# Made anew for each test; so is what is given as a lambda.
MADE = ("processing_class", "value_model", "reward_model")

# What the message names, arguments and settings
REFUSED = [
    # environments, tools, rollouts of one's own
    ("environment_factory", {"environment_factory": NoReset}),
    ("environment_factory", {"environment_factory": CountEnv()}),
    ("rollout_func", {"environment_factory": ToolEnv, "rollout_func": rollout}),
    ("rollout_func", {"rollout_func": rollout, "tools": [share_of_a]}),
    ("rollout_func", {**COUNT, "rollout_func": rollout}),
    ("tools", {**COUNT, "tools": [rollout]}),
    ("agent", {"agent": "my_agent"}),
    *(("agent", {"agent": rollout, **other}) for other in ({"tools": [len]}, {"rollout_func": len}, COUNT)),
    *((name, {name: 2}) for name in NEED_TURNS),
    ("max_turn_tokens", {"rollout_func": rollout, "max_turn_tokens": 2}),
    ("max_images", {"agent": rollout, "max_images": 2}),
    ("max_images", {**COUNT, "max_images": 2}),
    ("rollout_func", {"rollout_func": too_few, "reward_funcs": share_of_a}),
    ("env_mask", {"rollout_func": short_mask, "reward_funcs": share_of_a}),
    # rows
    ("train_dataset", {"train_dataset": EMPTY}),
    ("eval_dataset", {"eval_dataset": {"hard": EMPTY}}),
    ("train_dataset", {"train_dataset": rows(question="?")}),
    ("eval_dataset", {"eval_dataset": rows(text="a")}),
    ("train_dataset", {"train_dataset": rows(input_ids=[3, 4]), **COUNT}),
    ("max_steps", {"train_dataset": None, **COUNT, "max_steps": -1}),
    ("train_dataset", {"train_dataset": None}),
    ("prompt", {"train_dataset": DICT.to_iterable_dataset()}),
    ("images", {"train_dataset": rows(prompt="a", images="a.png")}),
    ("image", {"eval_dataset": {"hard": rows(prompt="a", image="a.png")}}),
    # models
    ("processing_class", {"processing_class": Images()}),
    ("processing_class", {"processing_class": grown}),
    ("data_collator", {"data_collator": lambda rows: rows}),
    ("value_model", {"value_model": headless}),
    ("value_model", {"value_model": two_labels}),
    ("value_model", {"value_model": lambda: value_model().requires_grad_(False)}),
    ("peft_config", {"peft_config": IA3}),
    # rewards
    ("reward_weights", {"reward_weights": [1.0, 2.0]}),
    ("reward_funcs", {"reward_funcs": None}),
    *(
        (func.__name__, {role: func})
        for role in ("reward_funcs", "turn_reward_funcs")
        for func in (rewarded(1.0, "one"), one_later)
    ),
    ("turn_reward_funcs", {"turn_reward_funcs": ["some/model"]}),
    ("mine()[1]", {"reward_funcs": rewarded(lambda n: [0.0, math.nan] * (n // 2))}),
    ("mine()[0]", {"reward_funcs": rewarded(lambda n: ["good"] * n)}),
    *(("mine", {"reward_funcs": rewarded(value)}) for value in ({"a": 1.0}, "1.0", lists)),
    ("reward_funcs", {"rollout_func": rollout}),
]
# The same, of a TypeError
OF_ANOTHER_TYPE = [
    ("args", {"args": {"max_steps": 1}}),
    ("args", {"args": "config.yaml"}),
    ("args", {"args": GRPOConfig(output_dir="out", **PLAIN)}),
    ("args", {"args": PPOConfig(output_dir="out", **PLAIN)}),
    ("processing_class", {"processing_class": lambda: "qwen"}),
    ("ref_model", {"ref_model": "qwen"}),
    ("tools[1]", {"tools": [look, "search"]}),
    ("answer", {"turn_reward_funcs": needs_answer}),
    ("answer", {"reward_funcs": needs_answer, "train_dataset": prompts(8).to_iterable_dataset()}),
]
BARE = {"train_dataset": rows(prompt="hi"), "processing_class": lambda: without("chat_template")}
# What is refused before weights are loaded
EARLY = [
    ("answer", {"reward_funcs": [share_of_a, needs_answer]}),
    ("answer", {"reward_funcs": [share_of_a, needs_answer_later]}),
    ("takes_little", {"reward_funcs": takes_little}),
    *(
        (role, {role: model})
        for role in ("reward_model", "reward_funcs")
        for model in (tiny_policy(TOKENIZER), lora_policy())
    ),
    *(
        (role, {role: rows(prompt=value)})
        for role in ("train_dataset", "eval_dataset")
        for value in (MESSAGE, ["a", "b"], 7, [{"role": "user", "text": "hi"}])
    ),
    *((role, {**BARE, role: prompts(8)}) for role in ("train_dataset", "eval_dataset")),
    # tools
    *(
        ("tools[1]", {"tools": [look, tool]})
        for tool in (find, untold, unhinted, Callable(), functools.partial(find), look)
    ),
    ("Untold.look", {"environment_factory": Untold}),
    ("ToolEnv.look", {"environment_factory": ToolEnv, "tools": [look]}),
    ("tools[0]", {"environment_factory": {"a": ToolEnv}, "tools": [look]}),
    ("ToolEnv.look", {"environment_factory": {"a": ToolEnv}, "tools": [look]}),
]


def made(arguments):
    return {k: v() if k in MADE and inspect.isfunction(v) else v for k, v in arguments.items()}


def start(folder, given, **settings):
    """Train with these arguments of the trainer and settings of its configuration."""
    arguments = {name: value for name, value in made(given).items() if name in ARGUMENTS}
    settings |= {name: value for name, value in given.items() if name not in ARGUMENTS}
    build(folder, STPPOTrainer, arguments=arguments, **settings).train()


def names(caught, name):
    """Whether the error has the name in backticks, alone or within an expression, in few words."""
    message = str(caught.value)
    return re.search(rf"`[\w.]*{re.escape(name)}\b|`{re.escape(name)}", message) and len(message) < 900


@pytest.mark.parametrize(("name", "given"), REFUSED)
def test_what_cannot_work_is_refused_by_name(name, given, tmp_path):
    with pytest.raises((ValueError, TypeError)) as caught:
        start(tmp_path, given)
    assert names(caught, name)


@pytest.mark.parametrize(("name", "given"), OF_ANOTHER_TYPE)
def test_what_is_of_another_type_is_refused_by_name(name, given, tmp_path):
    with pytest.raises(TypeError) as caught:
        start(tmp_path, given, max_steps=1)
    assert names(caught, name)


@pytest.mark.parametrize(("name", "given"), EARLY)
def test_what_can_be_seen_before_weights_are_loaded_is(name, given, tmp_path, monkeypatch):
    base = saved_base(tmp_path / "base")
    loaded = staticmethod(lambda *args, **kwargs: pytest.fail("weights are loaded"))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", loaded)
    with pytest.raises((ValueError, TypeError)) as caught:
        start(tmp_path / "run", {"model": base, **given})
    assert names(caught, name)


@pytest.mark.parametrize("wanted", [True, "nowhere"])
def test_a_checkpoint_that_is_not_there(wanted, tmp_path):
    with pytest.raises(ValueError, match=f"`resume_from_checkpoint.*{wanted!r}"):
        build(tmp_path / "run").train(resume_from_checkpoint=wanted)


@pytest.mark.parametrize(
    ("one", "other"),
    [("value_model", "reward_model"), ("value_model", "model"), ("ref_model", "model")],
)
def test_two_roles_may_not_be_one_object(one, other, tmp_path):
    model = value_model() if other == "reward_model" else tiny_policy(TOKENIZER)
    with pytest.raises(ValueError, match=f"`{one}` and `{other}`"):
        build(tmp_path, arguments={one: model, other: model})


def test_a_reward_model_that_returns_nan_is_named(tmp_path):
    model = value_model()
    torch.nn.init.constant_(model.score.weight, math.nan)
    with pytest.raises(ValueError, match="reward model"):
        build(tmp_path, arguments={"reward_funcs": None, "reward_model": model}).train()


def test_an_evaluation_inside_a_reward_function_is_refused(tmp_path):
    def mine(completions, **kwargs):
        trainer.evaluate(prompts(4))

    trainer = build(tmp_path, arguments={"reward_funcs": mine})
    with pytest.raises(RuntimeError, match="`evaluate`"):
        trainer.train()


@pytest.mark.long
def test_text_environments_and_rollouts_of_ones_own_need_no_template(tmp_path):
    build(tmp_path / "text", STPPOTrainer, arguments=made(BARE)).train()
    build(tmp_path / "env", STPPOTrainer, arguments=made(BARE) | COUNT).train()
    own = {"rollout_func": rollout, "processing_class": without("chat_template")}
    build(tmp_path / "own", STPPOTrainer, arguments=own)
