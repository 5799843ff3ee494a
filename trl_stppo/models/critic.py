"""Critics with one interface (`values`, `parameters`, `save`, `load`), and loading of weights in other forms.

`SharedCritic` adds a second LoRA adapter and a scalar head to the policy's own frozen backbone.
`SeparateCritic` is a separate sequence-classification model.
No critic adds a module to the policy that a weight push to an inference engine would send: the head is
outside of the policy, and the push skips the adapter by its name.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import load_sharded_checkpoint

from . import adapters

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD_FILE = "value_head.safetensors"
# Added to the mean square of a state before division.
EPSILON = 1e-6
# Mark of a head that reads scaled states, in the model's configuration.
SCALED = "reads_scaled_states"
ADAPTERS = "value_model"


def load_converted(model: Any, folder: Path) -> bool:
    """Load a folder's weights if their form on disk differs from the model's, and return whether it does.

    transformers saves the experts of a mixture as separate tensors, like checkpoints on the Hub, and keeps
    them in one tensor in memory. Its trainer loads only by name and skips names that it does not find.
    """
    names = _names(folder)
    if not names or not hasattr(model, "config") or names <= set(model.state_dict()):
        return False
    # Load in the widest dtype of all weights, so that narrower weights are rounded only once.
    dtype = reduce(torch.promote_types, (p.dtype for p in model.parameters()))
    # Copy the configuration, because loading writes the folder's name into it.
    config = copy.deepcopy(model.config)
    saved = type(model).from_pretrained(folder, config=config, dtype=dtype)
    model.load_state_dict(saved.state_dict())
    return True


def _names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder, or an empty set without safetensors files."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        return set()
    with safe_open(str(folder / SINGLE), framework="pt") as tensors:
        return set(tensors.keys())


def scalar_head(hidden_size: int, like: Tensor) -> nn.Linear:
    """Make a value head that starts at zero, so that the first advantages equal the returns."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    head = nn.Linear(hidden_size, 1, device=like.device, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Critic:
    """Predicts state values for every completion token with one forward pass of a backbone.

    The class itself is the critic of methods without one: it has nothing to train, save or load.

    Attributes:
        full: the weights that `save` writes if the modules hold only shards.
        parameter_names: names of the critic's parameters inside the policy.
    """

    full: dict[str, Tensor] | None = None
    parameter_names: Sequence[str] = ()
    head: nn.Module
    model: Any
    _base: PreTrainedModel

    def values(self, input_ids: Tensor, attention_mask: Tensor, num_tokens: int, **images: Tensor) -> Tensor:
        """Return the values of the states before and after each of the last T = `num_tokens` tokens.

        Entry t of [B, T + 1] is the value before token t, the last entry the value after the final token.
        `input_ids` [B, P + T] has a prompt of at least one token; `attention_mask` is 1 where a token counts.
        `images` are the model's inputs for images.
        """
        hidden = self.hidden_states(input_ids, attention_mask, **images)
        return self.score(hidden[:, -num_tokens - 1 :])

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """Return the last hidden state of the critic's backbone, [B, P + T, H].

        `inputs`: positions and images, if the model is to take them.
        """
        return self._base.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **inputs
        ).last_hidden_state

    def score(self, hidden: Tensor) -> Tensor:
        """Map hidden states [B, S, H] to values [B, S], float64 if the head is, else float32.

        The states are scaled to a root mean square of 1. Model families differ by a factor of thirty in it,
        and a step of Adam moves a value in proportion to the states.
        """
        dtype = next(self.head.parameters()).dtype
        # Autocast would round the values to bfloat16.
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(torch.promote_types(dtype, torch.float32))
            states = nn.functional.rms_norm(states, states.shape[-1:], eps=EPSILON)
            values = self.head(states.to(dtype)).squeeze(-1)
        return values if values.dtype == torch.float64 else values.float()

    def parameters(self) -> list[nn.Parameter]:
        """Return the critic's trainable parameters, in a stable order."""
        return []

    def save(self, folder: Path) -> None:
        """Save the critic in `folder`, so that `load` can restore it."""

    def load(self, folder: Path) -> None:
        """Load the critic that `save` wrote to `folder`, or raise FileNotFoundError if it is missing."""

    def active(self) -> AbstractContextManager[None]:
        """Context manager for the critic's forward pass and its backward pass, which recomputes layers."""
        return nullcontext()


class SharedCritic(Critic):
    """Critic on the policy's backbone, with a second adapter (`critic`) and a scalar head."""

    def __init__(self, model: PreTrainedModel) -> None:
        adapters.add_critic_adapter(model)
        self.model = model
        self._layers = adapters.adapter_layers(model)
        names = [n for n, _ in model.named_parameters() if adapters.CRITIC in n.split(".")]
        self.parameter_names = names
        self._base = model.get_base_model()
        config = self._base.config.get_text_config()
        self.head = scalar_head(config.hidden_size, like=model.get_input_embeddings().weight)
        adapters.match_policy_dtype(model, names)
        self._enable_gradients()

    def _enable_gradients(self) -> None:
        # Unfreeze the adapter, because PEFT freezes inactive adapters when it switches or loads adapters.
        for name in self.parameter_names:
            self.model.get_parameter(name).requires_grad_(True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager in which the backbone uses the critic's adapter. The adapter stays trainable."""
        with adapters.only_active(self._layers, adapters.CRITIC):
            self._enable_gradients()
            yield

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the critic's adapter and of the scalar head."""
        adapter = [self.model.get_parameter(name) for name in self.parameter_names]
        return adapter + list(self.head.parameters())

    def save(self, folder: Path) -> None:
        """Save the head, and also the adapter if PEFT has not saved it in `folder` yet."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "adapter_config.json").exists():
            self.model.save_pretrained(folder.parent, selected_adapters=[adapters.CRITIC])
        head = self.full or self.head.state_dict()
        head = {name: weight.detach().cpu().contiguous() for name, weight in head.items()}
        save_file(head, folder / HEAD_FILE)

    def load(self, folder: Path) -> None:
        """Load the adapter and the head from `folder`, or raise FileNotFoundError."""
        self.head.load_state_dict(load_file(folder / HEAD_FILE))
        weights = load_peft_weights(str(folder), device="cpu")
        set_peft_model_state_dict(self.model, weights, adapter_name=adapters.CRITIC)
        self._enable_gradients()


class SeparateCritic(Critic):
    """Critic with a separate sequence-classification model, with or without adapters.

    The model has `base_model_prefix` and a `score` head with one output, as in TRL's PPO scripts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not hasattr(base, "score") or not getattr(base, "base_model_prefix", ""):
            raise ValueError(
                f"`value_model` is a {type(base).__name__} without `score`, the head of a classifier."
            )
        if getattr(base.config, "num_labels", 1) != 1:
            raise ValueError(f"`value_model`: num_labels={base.config.num_labels}; must be 1.")
        self.model, self._base, self.head = model, base, base.score
        trained = any(bool(weight.any()) for weight in base.score.parameters())
        if trained and not getattr(base.config, SCALED, False):
            logger.warning(
                "The critic of %r has a head that was trained on states of another scale: its first values "
                "are off by a factor, until the head has learned.", str(base.name_or_path),
            )  # fmt: skip
        setattr(base.config, SCALED, True)
        if not self.parameters():
            raise ValueError("`value_model` has no trainable parameter: nothing could be learned.")

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of the critic's model."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def save(self, folder: Path) -> None:
        """Save the critic's model, or only its adapters if it has adapters."""
        self.model.save_pretrained(self._folder(folder), state_dict=self.full)

    def _folder(self, folder: Path) -> Path:
        # Use a deeper folder, because transformers loads adapters of direct subfolders into the policy.
        return folder / ADAPTERS if hasattr(self.model, "peft_config") else folder

    def load(self, folder: Path) -> None:
        """Load the critic's model or its adapters from `folder`, or raise FileNotFoundError."""
        folder = self._folder(folder)
        if (folder / "adapter_config.json").exists():
            set_peft_model_state_dict(self.model, load_peft_weights(str(folder), device="cpu"))
            return
        if load_converted(self.model, folder):
            return
        if (folder / INDEX).exists():
            load_sharded_checkpoint(self.model, str(folder))
            return
        self.model.load_state_dict(load_file(folder / SINGLE), strict=False)
