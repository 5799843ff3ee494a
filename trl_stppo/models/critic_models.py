"""The models of separate critics: the policy's architecture with a scalar head.

If transformers, or a repository's own code, has the architecture as a sequence-classification model with a
`score` head, that class is used. For other architectures a class is made from the causal model's backbone, in
the same form on disk: the backbone under its usual prefix, and `score.weight`.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_layers import GenericForSequenceClassification

AUTO_CLASS = "AutoModelForSequenceClassification"
# Arguments of `from_pretrained` that locate a configuration on the Hub.
PLACE = ("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token")


class _BackboneWithScore(GenericForSequenceClassification):
    """A causal model's backbone with a `score` head, based on transformers' generic classifier."""

    backbone_class: ClassVar[type[PreTrainedModel]]
    has_own_code: ClassVar[bool]

    def __init__(self, config: PretrainedConfig) -> None:
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        hidden = config.get_text_config().hidden_size
        self.score = nn.Linear(hidden, config.num_labels, bias=False)
        self.post_init()

    @classmethod
    def fresh(cls, config: PretrainedConfig, dtype: Any) -> PreTrainedModel:
        """Make a model with fresh weights from a configuration."""
        return cls._from_config(config, dtype=dtype)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the model, and the repository's code files if the model has remote code."""
        super().save_pretrained(save_directory, **kwargs)
        if self.has_own_code:
            custom_object_save(self, save_directory)


def _class_like(causal: PreTrainedModel) -> type[_BackboneWithScore]:
    """Make a sequence-classification class for a causal model whose architecture has none."""
    backbone, kind = causal.base_model, type(causal)
    if backbone is causal or not isinstance(backbone, PreTrainedModel):
        raise ValueError(
            f"No critic can be made of a {kind.__name__}, whose prefix names no backbone. Pass `value_model`."
        )
    parents = (cls for cls in kind.__mro__ if issubclass(cls, PreTrainedModel))
    family = next(cls for cls in parents if isinstance(backbone, cls))
    name = re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", kind.__name__)
    body = {
        "__module__": kind.__module__,
        "config_class": type(backbone.config),
        "base_model_prefix": causal.base_model_prefix,
        "backbone_class": type(backbone),
        "has_own_code": kind.__module__.startswith("transformers_modules."),
    }
    return type(f"{name}ForSequenceClassification", (_BackboneWithScore, family), body)


def _has_scored_class(config: PretrainedConfig) -> bool:
    """Return whether a sequence-classification model with a `score` head exists for the configuration."""
    if AUTO_CLASS in (getattr(config, "auto_map", None) or {}):
        return True
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return False
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if issubclass(known, GenericForSequenceClassification):
        return True
    with torch.device("meta"):
        return hasattr(known(copy.deepcopy(config)), "score")


def critic_from_policy(
    policy: PreTrainedModel, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Make a separate critic with the policy's current weights and a fresh scalar head."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.pad_token_id = config.get_text_config().pad_token_id
    if _has_scored_class(config):
        options: dict[str, Any] = {"dtype": policy.dtype, "trust_remote_code": trust_remote_code}
        model = AutoModelForSequenceClassification.from_config(config, **options)
    else:
        model = _class_like(policy).fresh(config, policy.dtype)
    model = model.to(policy.device)
    backbone = model.base_model
    for name, weight in policy.base_model.named_parameters():
        own = backbone.get_parameter(name)
        # Take each weight's dtype, because some weights may be in full precision.
        own.data = own.data.to(weight.dtype)
    backbone.load_state_dict(policy.base_model.state_dict())
    nn.init.zeros_(model.score.weight)
    return model


def critic_from_checkpoint(path: str, **model_init_kwargs: Any) -> PreTrainedModel:
    """Load a separate critic by name. If the checkpoint has no head, the head starts at zero."""
    # If unset, transformers prompts in a terminal before it runs a repository's code.
    options = {"trust_remote_code": False, **model_init_kwargs}
    own = _own_class_of(path, options)
    model, info = (own or AutoModelForSequenceClassification).from_pretrained(
        path, num_labels=1, output_loading_info=True, **options
    )
    if any(key.startswith("score.") for key in info["missing_keys"]):
        saved = (model.config.architectures or [""])[0]
        if own is not None and saved.endswith("ForSequenceClassification"):
            raise ValueError(
                f"The value model {path!r} is a {saved}, whose head is not called `score` and would be lost."
            )
        # Under ZeRO-3 the weight is in `ds_tensor`.
        weight = model.score.weight
        nn.init.zeros_(getattr(weight, "ds_tensor", weight))
    return model


def _own_class_of(path: str, options: dict[str, Any]) -> type[_BackboneWithScore] | None:
    """Make the classifier class for a checkpoint's architecture. Return None if transformers has one."""
    place = {name: options[name] for name in PLACE if name in options}
    trust = options["trust_remote_code"]
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust, **place)
    except (OSError, ValueError):
        # An adapter has no such file. For any other path, loading raises transformers' own error.
        return None
    if _has_scored_class(config):
        return None
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    return _class_like(causal)
