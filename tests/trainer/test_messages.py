"""Mistakes in what a trainer is given are named, where that can be before weights are loaded."""

from __future__ import annotations

import functools

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, PreTrainedModel, Qwen2Model

from tests.builders import build, prompts, share_of_a
from tests.fakes import CountEnv, char_tokenizer, tiny_config, tiny_policy, tiny_value_model
from tests.hub.hub_kit import saved_base
from trl_stppo import STPPOTrainer
from trl_stppo.rollout.reward_funcs import check_columns


def one_number(completions, **kwargs):
    return 1.0


async def one_number_later(completions, **kwargs):
    return 1.0


def needs_answer(completions, answer, **kwargs):
    return [1.0] * len(completions)


async def needs_answer_later(completions, *, answer, **kwargs):
    return [1.0] * len(completions)


def takes_little(prompts, completions):
    return [1.0] * len(completions)


def has_default(completions, answer=None, **kwargs):
    return [1.0] * len(completions)


def too_few(prompts, trainer):
    ids = [[5, 6]] * (len(prompts) - 1)
    return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}


@pytest.fixture
def no_weights(tmp_path, monkeypatch):
    """The name of a model that nobody may load."""
    name = saved_base(tmp_path / "base")
    monkeypatch.setattr(
        PreTrainedModel,
        "from_pretrained",
        lambda *args, **kwargs: pytest.fail("weights are loaded"),
    )
    return name


@pytest.mark.parametrize("func", [one_number, one_number_later])
@pytest.mark.parametrize("role", ["reward_funcs", "turn_reward_funcs"])
def test_a_reward_function_that_returns_one_number(func, role, tmp_path):
    trainer = build(tmp_path, arguments={role: func})
    said = rf"`{func.__name__}` returned 1.0 \(a float\) for \d completions. Return a list"
    with pytest.raises(ValueError, match=said):
        trainer.train()


@pytest.mark.parametrize("value", [{"a": 1.0}, "1.0", [[1.0, 2.0]] * 8, [{}] * 8])
def test_a_reward_that_is_no_number_is_named_with_its_type(value, tmp_path):
    def mine(completions, **kwargs):
        return value

    kind = type(value[0] if isinstance(value, list) else value).__name__
    with pytest.raises(ValueError, match=rf"`mine.*\(a {kind}\)"):
        build(tmp_path, arguments={"reward_funcs": mine}).train()


def test_an_evaluation_inside_a_reward_function_is_refused(tmp_path):
    def mine(completions, **kwargs):
        trainer.evaluate(prompts(4))
        return [0.0] * len(completions)

    trainer = build(tmp_path, arguments={"reward_funcs": mine})
    with pytest.raises(RuntimeError, match="`evaluate` was called inside a reward function"):
        trainer.train()


@pytest.mark.parametrize("func", [needs_answer, needs_answer_later])
def test_a_reward_function_that_needs_a_column_that_is_not_there(func, no_weights, tmp_path):
    arguments = {"model": no_weights, "reward_funcs": [share_of_a, func]}
    said = rf"`{func.__name__}` needs `answer`; besides the prompt the rows have answers, level."
    rows = prompts(8, answers=["a"] * 8, level=[1] * 8)
    with pytest.raises(TypeError, match=said):
        build(tmp_path / "run", arguments={**arguments, "train_dataset": rows})


@pytest.mark.parametrize("role", ["turn_reward_funcs", "streams"])
def test_the_same_where_it_shows_only_in_a_rollout(role, tmp_path):
    arguments = {"turn_reward_funcs": needs_answer}
    if role == "streams":
        rows = prompts(8, level=[1] * 8).to_iterable_dataset()
        arguments = {"reward_funcs": needs_answer, "train_dataset": rows}
    trainer = build(tmp_path, arguments=arguments, max_steps=1)
    with pytest.raises(TypeError, match="`needs_answer` needs `answer`"):
        trainer.train()


def test_a_reward_function_without_room_for_the_rest(no_weights, tmp_path):
    said = "`takes_little` does not take `completion_ids`, `trainer_state`.*Add `\\*\\*kwargs` to"
    with pytest.raises(TypeError, match=said):
        build(tmp_path / "run", arguments={"model": no_weights, "reward_funcs": takes_little})


@functools.wraps(needs_answer)
def decorated(**kwargs):
    return needs_answer(answer=None, **kwargs)


def test_functions_that_fit_are_called(tmp_path):
    funcs = [has_default, functools.partial(needs_answer, answer=None), decorated, share_of_a]
    trainer = build(tmp_path, arguments={"reward_funcs": funcs})
    trainer.train()
    assert trainer.state.global_step
    check_columns(max, ["prompts"], [])  # which has no signature


@pytest.mark.parametrize("role", ["reward_model", "reward_funcs", "turn_reward_funcs"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_causal_model_gives_no_rewards(role, lora, no_weights, tmp_path):
    model = tiny_policy(char_tokenizer(), seed=3)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    # Functions of turns are looked at when the player is there.
    policy = no_weights if role != "turn_reward_funcs" else tiny_policy(char_tokenizer())
    name = {"reward_model": "reward_model"}.get(role, rf"{role}\[0\]")
    with pytest.raises(ValueError, match=f"^`{name}` is a Qwen2ForCausalLM, which gives a logit"):
        build(tmp_path / "run", arguments={"model": policy, role: model})


@pytest.mark.parametrize("prompt", [{"role": "user", "content": "hi"}, ["hi", "ho"], 7])
@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_a_prompt_of_no_known_form(prompt, which, no_weights, tmp_path):
    rows = Dataset.from_list([{"prompt": prompt}] * 8)
    with pytest.raises(ValueError, match="The `prompt` of a row is"):
        build(tmp_path / "run", arguments={"model": no_weights, which: rows})


def test_one_that_comes_in_a_stream(tmp_path):
    rows = Dataset.from_list([{"prompt": {"role": "user", "content": "hi"}}] * 8)
    arguments = {"train_dataset": rows.to_iterable_dataset()}
    with pytest.raises(ValueError, match="The `prompt` of a row is"):
        build(tmp_path, arguments=arguments, max_steps=1).train()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_messages_for_a_tokenizer_without_template(which, given, no_weights, tmp_path):
    bare = char_tokenizer()
    bare.chat_template = None
    (tmp_path / "base" / "chat_template.jinja").unlink()
    arguments = {"model": no_weights, "processing_class": bare if given else None}
    arguments["train_dataset"] = Dataset.from_dict({"prompt": ["hi"] * 8})
    arguments[which] = prompts(8)
    with pytest.raises(ValueError, match=rf"prompts of `{which}` are messages, .*no chat template"):
        build(tmp_path / "run", arguments=arguments)


def test_text_and_rollouts_of_ones_own_need_none(tmp_path):
    bare = char_tokenizer()
    bare.chat_template = None
    text = {"train_dataset": Dataset.from_dict({"prompt": ["hi"] * 8}), "processing_class": bare}
    build(tmp_path / "text", STPPOTrainer, arguments=text).train()
    text |= {"environment_factory": CountEnv}
    build(tmp_path / "env", STPPOTrainer, arguments=text).train()

    def rollout(prompts, trainer):
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    own = {"rollout_func": rollout, "processing_class": bare}
    build(tmp_path / "own", STPPOTrainer, arguments=own)


def test_a_rollout_func_that_returns_too_few(tmp_path):
    arguments = {"rollout_func": too_few, "reward_funcs": share_of_a}
    with pytest.raises(ValueError, match=r"`rollout_func` returned 7 episodes: .* for 8 prompts"):
        build(tmp_path, arguments=arguments).train()


# ------------------------------------------------------------------------------------- models


def grown():
    """A tokenizer with one token more than its model."""
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["<new>"])
    return tokenizer


PACKED = BitsAndBytesConfig(load_in_4bit=True)
WRONG_MODELS = {
    "name of a tokenizer": (TypeError, {"processing_class": "qwen"}, "processing_class", "qwen"),
    "name of a reference": (TypeError, {"ref_model": "qwen"}, "ref_model", "qwen"),
    "class": (TypeError, {"model": Qwen2Model}, "model", "Qwen2Model"),
    "classifier": (
        *(TypeError, {"model": tiny_value_model(char_tokenizer())}, "model"),
        "Qwen2ForSequenceClassification",
    ),
    "bare": (
        TypeError,
        {"model": Qwen2Model(tiny_config(char_tokenizer()))},
        "model",
        "Qwen2Model",
    ),
    "folder": (ValueError, {"model": "./nope"}, "model", "./nope"),
    "packed": (ValueError, {"quantization_config": PACKED}, "peft_config", "load_in_4bit"),
    "tokens": (ValueError, {"processing_class": grown()}, "processing_class", "has 99 rows"),
}


@pytest.mark.parametrize("kind", WRONG_MODELS)
def test_what_cannot_be_a_policy_is_named(tmp_path, kind):
    error, arguments, field, value = WRONG_MODELS[kind]
    with pytest.raises(error, match=f"`{field}[=`].*{value}|{value}.*`{field}[=`]"):
        build(tmp_path, arguments=arguments)


def test_a_special_token_that_no_row_has_may_lack_one(tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    build(tmp_path, arguments={"processing_class": tokenizer})
    tokenizer.pad_token = "<image>"
    with pytest.raises(ValueError, match="`processing_class`"):
        build(tmp_path, arguments={"processing_class": tokenizer})


@pytest.mark.parametrize(
    ("prompt", "warns"),
    [
        ("say a ", True),
        ("<|im_start|>u say a ", False),
        ([{"role": "user", "content": "a"}], False),
    ],
)
def test_plain_prompts_beside_a_chat_template_are_pointed_at(tmp_path, caplog, prompt, warns):
    rows = Dataset.from_dict({"prompt": [prompt] * 8})
    build(tmp_path, arguments={"train_dataset": rows, "eval_dataset": rows})
    assert caplog.text.count("plain text") == warns


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens", "eos_token_id"])
def test_what_turns_have_settings_for_is_no_generation_kwarg(tmp_path, name):
    with pytest.raises(ValueError, match=f"`generation_kwargs` has {name}=3: set `"):
        build(tmp_path, generation_kwargs={name: 3})
