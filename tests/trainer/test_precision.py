"""Trained weights in half precision: what does not move is told, what ends in NaN is refused."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.kit.builders import build
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.precision import unmoved

STILL, FAST = 1e-6, 1e-2


def policy(dtype=torch.bfloat16):
    return tiny_policy(char_tokenizer()).to(dtype)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if "does not move" in r.getMessage()]


def built(folder, model, caplog, **options):
    """Builds a trainer, and returns it with its warnings of rounding."""
    arguments = {"model": model, **options.pop("arguments", {})}
    with caplog.at_level(logging.WARNING):
        trainer = build(folder, STPPOTrainer, arguments=arguments, **options)
    return trainer, warnings(caplog)


def test_weights_that_steps_do_not_move_are_told_once(tmp_path, caplog, capsys):
    rates = {"learning_rate": STILL, "critic_learning_rate": 1e-5}
    trainer, told = built(tmp_path, policy(), caplog, **rates, max_steps=1)
    assert len(told) == 1
    assert "`learning_rate=1e-06`" in told[0]
    assert "`critic_learning_rate=1e-05`" in told[0]
    assert "bfloat16" in told[0]
    trainer.train()
    assert "! rounding: a step of `learning_rate=1e-06`" in capsys.readouterr().out


def test_float32_and_large_steps_are_not_warned_of(tmp_path, caplog):
    small = {"learning_rate": STILL, "critic_learning_rate": STILL}
    large = {"learning_rate": FAST, "critic_learning_rate": FAST}
    assert not built(tmp_path, policy(torch.float32), caplog, **small)[1]
    assert not built(tmp_path, policy(), caplog, **large)[1]
    lora = {"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM")}
    assert not built(tmp_path, policy(), caplog, arguments=lora, **small)[1]


def test_an_adapter_in_half_precision_is_warned_of(tmp_path, caplog):
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights="gaussian")
    model = get_peft_model(policy(), lora, autocast_adapter_dtype=False)
    assert len(built(tmp_path, model, caplog, learning_rate=STILL, kl_coef=0.0)[1]) == 1


def test_trained_weights_in_float16_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`model`"):
        build(tmp_path, STPPOTrainer, arguments={"model": policy(torch.float16)})


def test_half_the_distance_decides():
    """Between 1 and 2 neighbours in bfloat16 are 2**-7 apart, between 0.25 and 0.5 2**-9."""
    weight = torch.tensor([1.5, 0.375]).bfloat16()
    assert [unmoved([weight], rate) for rate in (2**-9, 2**-11, 2**-7)] == [0.5, 1.0, 0.0]
