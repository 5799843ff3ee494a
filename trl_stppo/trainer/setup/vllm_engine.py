"""Options of a colocated vLLM engine that TRL does not set."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...models.adapter_checks import NEUTRAL_INITS, is_lora
from .. import _trl_vllm as door
from ..loop.sampler import speaks_to_vllm
from ..ppo_config import PPOConfig
from ..sharding import runtime

# Fields of an adapter that vLLM does not support, and the ranks that it allocates.
SPECIAL = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("trainable_token_indices", "target_parameters", "lora_bias", "kasa_config", "use_bdlora"),
)
# Keys of `model_init_kwargs` that do not change the weights of the name.
SAME_WEIGHTS = {
    *("dtype", "torch_dtype", "attn_implementation", "device_map", "quantization_config"),
    *("trust_remote_code", "low_cpu_mem_usage", "use_cache"),
}
# TRL's ModelConfig always sets `revision` to "main".
USUAL = (None, "main")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def colocated_engine(
    trainer: Any, args: PPOConfig, *, loaded_by_name: bool
) -> AbstractContextManager[None]:
    """Context manager of upstream's constructor that sets further options of a colocated vLLM engine.

    `loaded_by_name`: the policy's base weights are those of its name.
    """
    if not args.use_vllm or args.vllm_mode != "colocate":
        return nullcontext()

    def options() -> dict[str, Any]:
        overrides = args.vllm_engine_kwargs or {}
        assert isinstance(overrides, dict)
        kwargs = (args.model_init_kwargs or {}).items()
        plain = all(name in SAME_WEIGHTS or value in USUAL for name, value in kwargs)
        alone = loaded_by_name and plain and trainer.rollout_func is None
        alone = alone and speaks_to_vllm(trainer)
        rank = adapter_rank(trainer) if alone else None
        lora = {} if rank is None else {"enable_lora": True, "max_lora_rank": rank}
        return {"dtype": _dtype(args, trainer.model), **lora, **overrides}

    return door.engine_options(options)


def _dtype(args: PPOConfig, model: Any) -> str:
    """Return the dtype of the policy's forward passes, as vLLM's option."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return str(model.dtype).removeprefix("torch.")


def adapter_rank(trainer: Any) -> int | None:
    """Return the LoRA rank that vLLM must allocate, or None if the policy's adapter has to be merged.

    Merged weights always work, but they are rounded once more, and sent in full.
    """
    model, args = trainer.model, trainer.args
    if args.vllm_enable_sleep_mode or runtime.shards_weights(trainer.accelerator):
        return None
    if not hasattr(model, "peft_config"):
        return None
    config = model.peft_config[model.active_adapter]
    if not is_lora(config) or config.init_lora_weights not in (*NEUTRAL_INITS, False):
        return None
    if config.bias != "none" or any(getattr(config, name, None) for name in SPECIAL):
        return None
    base = model.get_base_model()
    outside = [base.get_input_embeddings(), base.get_output_embeddings()]
    if any(hasattr(module, "lora_A") for module in outside):
        return None
    return next((rank for rank in RANKS if rank >= config.r), None)
