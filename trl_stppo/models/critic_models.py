"""The models of separate critics: the backbone of a causal model and a linear layer, `score`.

Their form on disk is that of transformers' sequence-classification models: the backbone under its usual
prefix, and `score.weight`.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification


def _class_like(causal: PreTrainedModel) -> type[PreTrainedModel]:
    """Make the class of critics with the backbone of a causal model."""
    backbone, kind, prefix = causal.base_model, type(causal), causal.base_model_prefix
    if backbone is causal or not isinstance(backbone, PreTrainedModel):
        raise ValueError(
            f"No critic can be made of a {kind.__name__}, whose prefix names no backbone. Pass `value_model`."
        )
    parents = (cls for cls in kind.__mro__ if issubclass(cls, PreTrainedModel))
    family = next(cls for cls in parents if isinstance(backbone, cls))

    def init(self: Any, config: PretrainedConfig) -> None:
        super(GenericForSequenceClassification, self).__init__(config)
        setattr(self, prefix, type(backbone)(config))
        self.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
        self.post_init()

    name = re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", kind.__name__)
    body = {"__module__": kind.__module__, "config_class": type(backbone.config)}
    body |= {"base_model_prefix": prefix, "__init__": init}
    bases = (GenericForSequenceClassification, family)
    return type(f"{name}ForSequenceClassification", bases, body)


def critic_from_policy(policy: PreTrainedModel) -> PreTrainedModel:
    """Make a separate critic with the policy's current weights and a fresh scalar head."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.pad_token_id = config.get_text_config().pad_token_id
    model: Any = _class_like(policy)._from_config(config, dtype=policy.dtype).to(policy.device)
    backbone = model.base_model
    for name, weight in policy.base_model.named_parameters():
        own = backbone.get_parameter(name)
        # Take each weight's dtype, because some weights may be in full precision.
        own.data = own.data.to(weight.dtype)
    backbone.load_state_dict(policy.base_model.state_dict())
    nn.init.zeros_(model.score.weight)
    return model


def critic_from_checkpoint(path: str, **model_init_kwargs: Any) -> PreTrainedModel:
    """Load a separate critic by name: a critic, a classifier with one label, or a causal model.

    The head of a causal model starts at zero.
    """
    # If unset, transformers prompts in a terminal before it runs a repository's code.
    options = {"trust_remote_code": False, **model_init_kwargs}
    config = AutoConfig.from_pretrained(path, **options)
    with torch.device("meta"):
        trust = options["trust_remote_code"]
        # `from_config` does not know "auto".
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    model, info = _class_like(causal).from_pretrained(path, num_labels=1, output_loading_info=True, **options)
    if "score.weight" in info["missing_keys"]:
        saved = (model.config.architectures or [""])[0]
        if saved.endswith("ForSequenceClassification"):
            raise ValueError(
                f"The value model {path!r} is a {saved}, whose head is not called `score` and would be lost."
            )
        # Under ZeRO-3 the weight is in `ds_tensor`.
        weight = model.score.weight
        nn.init.zeros_(getattr(weight, "ds_tensor", weight))
    return model
