"""Critic, reference and reward models are compared with what they will read, all by the same check."""

import logging

import pytest
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    GPT2Model,
)

from tests.kit.builders import TEXT, build, train
from tests.kit.fakes import char_tokenizer
from trl_stppo import STPPOTrainer

TOKENIZER = char_tokenizer()
SIZE = len(TOKENIZER)
# Each role that another model can have, and whether it scores texts.
ROLES = {
    "value_model": True,
    "ref_model": False,
    "reward_model": True,
    "reward_funcs": True,
}
SCORERS = ("reward_model", "reward_funcs")


def model(kind=GPT2ForSequenceClassification, rows=SIZE, context=256, **options):
    options = {"pad_token_id": TOKENIZER.pad_token_id, "num_labels": 1, **options}
    return kind(GPT2Config(vocab_size=rows, n_embd=16, n_layer=1, n_head=2, n_positions=context, **options))


def given(role, one):
    """Arguments that give a model this role."""
    if role == "reward_funcs":
        return {**TEXT, role: [one], "reward_processing_classes": [TOKENIZER]}
    return {**TEXT, role: one}


def fitting(role, **options):
    return model(GPT2ForSequenceClassification if ROLES[role] else GPT2LMHeadModel, **options)


@pytest.mark.parametrize("role", ROLES)
def test_too_few_rows_are_refused(role, tmp_path):
    with pytest.raises(ValueError, match=rf"`{role}(\[0\])?` has {SIZE - 4} rows"):
        build(tmp_path, STPPOTrainer, arguments=given(role, fitting(role, rows=SIZE - 4)))


@pytest.mark.parametrize("role", ROLES)
def test_a_shorter_context_limits_the_episodes(role, tmp_path, caplog):
    options = {"max_steps": 1, "max_completion_length": 200, "max_turns": 40}
    with caplog.at_level(logging.WARNING):
        trainer = train(tmp_path, STPPOTrainer, arguments=given(role, fitting(role, context=64)), **options)
    limit = 48 if role in SCORERS else 64
    assert trainer._player.engine.limits.max_context_tokens == limit
    assert trainer._player.eval_engine.limits.max_context_tokens == limit
    assert f"`{role}" in caplog.text


def test_a_reward_model_refuses_a_longer_text(tmp_path):
    """Only it knows how many tokens its own tokenizer makes of a text."""
    trainer = build(
        tmp_path, STPPOTrainer, arguments=given("reward_funcs", fitting("reward_funcs", context=64))
    )
    with pytest.raises(ValueError, match=r"`reward_funcs.*64 tokens"):
        trainer.reward_funcs[0](**TOKENIZER("a" * 65, return_tensors="pt"))


@pytest.mark.parametrize("role", SCORERS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("kind", "options"), [
    (GPT2LMHeadModel, {}), (GPT2Model, {}), (GPT2ForTokenClassification, {}),
    (GPT2ForSequenceClassification, {"num_labels": 3}),
], ids=["causal", "headless", "tokens", "labels"])  # fmt: skip
def test_a_model_without_a_head_for_scores_is_refused(kind, options, named, role, tmp_path):
    one = model(kind, **options)
    if named:
        one.save_pretrained(tmp_path / "model")
        TOKENIZER.save_pretrained(tmp_path / "model")
        one = str(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"`{role}(\[0\])?`.*{kind.__name__}"):
        build(tmp_path, STPPOTrainer, arguments=given(role, one))


def other_words(folder):
    """A tokenizer of the same size, two of whose letters are exchanged."""
    tokenizer = char_tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    vocabulary = tokenizer.get_vocab()
    a, b = vocabulary["a"], vocabulary["b"]
    text = text.replace(f'"a":{a}', f'"a":{b}', 1).replace(f'"b":{b}', f'"b":{a}', 1)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(text)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("named", [True, False])
def test_another_vocabulary_is_refused(named, role, tmp_path):
    fitting(role).save_pretrained(tmp_path / "model")
    other_words(tmp_path / "model")
    one = str(tmp_path / "model")
    if not named or role == "ref_model":
        one = type(fitting(role)).from_pretrained(one)
    with pytest.raises(ValueError, match=f"`{role}.*vocabulary"):
        build(tmp_path, STPPOTrainer, arguments=given(role, one))
