"""What the memory model says that layers keep for the backward pass, against what autograd keeps."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from trl_stppo.models import memory
from trl_stppo.models.memory import Setup
from trl_stppo.models.shapes import geometry_of, policy_shape


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.float32, True)],
    ids=["float32", "bfloat16", "float32 under autocast"],
)
def test_what_autograd_keeps_of_a_layer(dtype, autocast, lora):
    """Two layers more, so that only what belongs to layers counts; within 5 percent."""
    per_layer = (saved(dtype, autocast, lora, 3) - saved(dtype, autocast, lora, 1)) / 2
    setup = Setup(
        geometry=geometry_of(policy_shape(layered(1), "float32")), weights=0, trainable=0,
        critic_trainable=0, full=not lora, weight_bytes=dtype.itemsize,
        compute_bytes=2 if autocast else dtype.itemsize,
        trainable_bytes=4 if lora else dtype.itemsize, rows=2, completion=128, checkpointing=False,
    )  # fmt: skip
    stored = [
        memory._graph(setup, geometry_of(policy_shape(layered(n), "float32")), not lora, 256)[0]
        for n in (1, 3)
    ]
    assert (stored[1] - stored[0]) / 2 == pytest.approx(per_layer, rel=0.05)


def layered(layers: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip


def saved(dtype: torch.dtype, autocast: bool, lora: bool, layers: int) -> int:
    """Bytes that a forward pass leaves for the backward pass, weights not counted."""
    model = AutoModelForCausalLM.from_config(layered(layers)).to(dtype)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(512, (2, 128))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    backbone = model.get_base_model().model if lora else model.model
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        backbone(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
