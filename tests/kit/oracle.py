"""Loads the recorded run of TRL 1.12's PPOTrainer and rebuilds the models it was run with.

The fixture is written by ``scripts/oracle/make_oracle.py``, whose docstring lists every recorded
tensor. The models are described by ``settings["model"]`` (keyword arguments of ``Qwen2Config``),
so that they can be rebuilt with whatever transformers version the tests run under.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

FIXTURE = Path(__file__).parents[1] / "fixtures" / "ppo_oracle.safetensors"
VARIANTS = ("one_epoch", "two_epochs")
_MODEL_CLASSES = {
    "policy": Qwen2ForCausalLM,
    "ref": Qwen2ForCausalLM,
    "value": Qwen2ForSequenceClassification,
    "reward": Qwen2ForSequenceClassification,
}


class Oracle(NamedTuple):
    """Tensors and settings of one recorded run; unpacks as ``tensors, settings``."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]

    def state(self, prefix: str) -> dict[str, Tensor]:
        """The tensors below a prefix as "init/policy" or "step1/grad/value", without it."""
        start = prefix + "/"
        return {k[len(start) :]: v for k, v in self.tensors.items() if k.startswith(start)}


class OracleModels(NamedTuple):
    """The four models and the tokenizer, in the state they had before the recorded update."""

    policy: Qwen2ForCausalLM
    ref: Qwen2ForCausalLM
    value: Qwen2ForSequenceClassification
    reward: Qwen2ForSequenceClassification
    tokenizer: PreTrainedTokenizerFast


def load_oracle(name: str, path: Path = FIXTURE) -> Oracle:
    """The recorded run "one_epoch" or "two_epochs": its tensors, without its prefix, and its settings."""
    if name not in VARIANTS:
        raise ValueError(f"Unknown oracle run {name!r}, expected one of {VARIANTS}.")
    settings = json.loads(path.with_suffix(".json").read_text())
    settings |= settings.pop("variants")[name]
    tensors = {}
    for key, value in load_file(path).items():
        if key.startswith("init/"):
            tensors[key] = value
        elif key.startswith(name + "/"):
            tensors[key.removeprefix(name + "/")] = value
    return Oracle(tensors, settings)


def build_models(
    fixture: tuple[dict[str, Tensor], dict[str, Any]], dtype: torch.dtype = torch.float64
) -> OracleModels:
    """Policy, reference, value and reward model of a recorded run in eval mode, and its tokenizer."""
    fixture = Oracle(*fixture)
    models = {}
    for kind in _MODEL_CLASSES:
        model = new_model(kind, fixture.settings["model"], dtype)
        model.load_state_dict(fixture.state(f"init/{kind}"))
        models[kind] = model.eval()
    return OracleModels(**models, tokenizer=build_tokenizer(fixture.settings["tokenizer"]))


def new_model(kind: str, config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A "policy", "ref", "value" or "reward" model of random weights, drawn in float32 and then cast."""
    head = {} if kind in ("policy", "ref") else {"num_labels": 1}
    model = _MODEL_CLASSES[kind](Qwen2Config(**config, **head, dtype="float32"))
    return model.to(dtype)


def build_tokenizer(settings: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The word-level tokenizer: one word per id, words separated by blanks."""
    special = {settings[f"{name}_token_id"]: f"<{name}>" for name in ("pad", "eos", "unk")}
    vocab = {special.get(i, f"t{i}"): i for i in range(settings["vocab_size"])}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left",
    )  # fmt: skip
