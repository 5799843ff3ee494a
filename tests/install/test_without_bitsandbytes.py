"""bitsandbytes is optional: where a setting needs it and it is missing, an error names both."""

from __future__ import annotations

import sys

import pytest
from transformers import BitsAndBytesConfig

from tests.fakes import char_tokenizer, tiny_policy
from tests.scripted import scripted_trainer
from trl_stppo.trainer.setup import packages


@pytest.fixture
def missing(monkeypatch):
    """A machine without it; transformers has made its own mind up before."""
    for name in [n for n in sys.modules if n.split(".")[0] == packages.BITSANDBYTES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"optim": "paged_adamw_8bit"}, r"`optim='paged_adamw_8bit'`"),
        ({"optim": "lion_32bit"}, r"`optim='lion_32bit'`"),
        (
            {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
            r"`quantization_config` asks for load_in_4bit",
        ),
        (
            {"model_init_kwargs": {"quantization_config": {"load_in_8bit": True}}},
            r"quantization_config'\]` asks for load_in_8bit",
        ),
    ],
)
def test_what_needs_it_is_refused_by_name(options, setting, missing, tmp_path):
    with pytest.raises(ImportError, match=setting) as caught:
        scripted_trainer(tmp_path, **options)
    assert "pip install bitsandbytes" in str(caught.value)


def test_a_quantised_model_is_refused_too(missing, tmp_path):
    model = tiny_policy(char_tokenizer())
    model.config.quantization_config = {"load_in_4bit": True}
    with pytest.raises(ImportError, match=r"`model\.config\.quantization_config` asks for"):
        scripted_trainer(tmp_path, model=model)


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "rmsprop", "adamw_torch_8bit"])
def test_training_goes_without_it(optim, missing, tmp_path):
    trainer, _ = scripted_trainer(tmp_path, optim=optim)
    assert trainer.critic is not None
