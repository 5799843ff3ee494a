"""The plan of a run, made before GRPOTrainer's constructor is called."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from ...hub.loading import load_processor
from ...models.adapters import NEUTRAL_INITS, is_lora
from ...rollout.chat import check_template
from ...rollout.images import TEXTS_ONLY
from .. import _trl_vllm
from .._trl import GRPOTrainer, replaced
from ..engine import engine_of
from ..planning.data import DataPlan
from ..planning.plan import RolloutPlan, fitted_tokenizer, model_name
from ..planning.rewards import RewardPlan
from ..ppo_config import PPOConfig
from .models import GivenCritic, ReferencePlan
from .players import why_own_turns

logger = logging.getLogger(__name__)

# Fields of an adapter that vLLM does not support.
SPECIAL = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("trainable_token_indices", "target_parameters", "lora_bias", "kasa_config", "use_bdlora"),
)
# Keys of `model_init_kwargs` that do not change the weights that a name stands for.
SAME_WEIGHTS = {
    *("dtype", "torch_dtype", "attn_implementation", "device_map", "quantization_config"),
    *("trust_remote_code", "low_cpu_mem_usage", "use_cache"),
}
# TRL's ModelConfig always sets `revision` to "main".
USUAL = (None, "main")
# Ranks that vLLM can allocate.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def colocated_engine(
    trainer: GRPOTrainer, args: PPOConfig, *, loaded_by_name: bool
) -> AbstractContextManager[None]:
    """Context manager around upstream's constructor that sets further options of a colocated vLLM engine.

    `loaded_by_name`: whether the policy's base weights were loaded by name.
    """
    if not args.use_vllm or args.vllm_mode != "colocate":
        return nullcontext()

    def options() -> dict[str, Any]:
        overrides = args.vllm_engine_kwargs or {}
        assert isinstance(overrides, dict)
        kwargs = (args.model_init_kwargs or {}).items()
        plain = all(name in SAME_WEIGHTS or value in USUAL for name, value in kwargs)
        alone = loaded_by_name and plain and trainer.rollout_func is None
        alone = alone and args.vllm_tensor_parallel_size == 1 and why_own_turns(trainer) is None
        rank = adapter_rank(trainer) if alone else None
        lora = {} if rank is None else {"enable_lora": True, "max_lora_rank": rank}
        # vLLM computes in the dtype of the policy's forward passes.
        dtype = "bfloat16" if args.bf16 else str(trainer.model.dtype).removeprefix("torch.")
        return {"dtype": dtype, **lora, **overrides}

    return _trl_vllm.engine_options(options)


def adapter_rank(trainer: GRPOTrainer) -> int | None:
    """Return the LoRA rank that vLLM must allocate, or None if the policy's adapter has to be merged.

    Merged weights always work, but they are rounded once more, and sent in full.
    """
    model, args = trainer.model, trainer.args
    if args.vllm_enable_sleep_mode or engine_of(trainer.accelerator).gathers:
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


@dataclass(frozen=True)
class RunPlan:
    """Players, rows, policy, reference, critic and rewards of a run."""

    args: PPOConfig
    rollout: RolloutPlan
    evaluation: RolloutPlan
    data: DataPlan
    rewards: RewardPlan
    reference: ReferencePlan
    critic: GivenCritic
    model: str | PreTrainedModel
    processing_class: PreTrainedTokenizerBase | None
    quantization_config: BitsAndBytesConfig | None

    def upstream_arguments(self) -> dict[str, Any]:
        """Return the arguments for GRPOTrainer's constructor that the plan determines."""
        data = self.data
        tokenizer = self._tokenizer()
        self._check_images(tokenizer)
        return {
            "args": self.args,
            "model": self.model,
            "processing_class": fitted_tokenizer(tokenizer, self.rollout),
            "quantization_config": self.quantization_config,
            # Pass a copy, because upstream appends the functions of environments.
            "reward_funcs": list(self.rewards.funcs),
            "reward_processing_classes": self.rewards.processing_classes,
            "train_dataset": data.train,
            "eval_dataset": data.evaluation,
            "environment_factory": self.rollout.tool_environments,
        }

    def _tokenizer(self) -> Any:
        """Return the given tokenizer, or load the model's tokenizer."""
        args, processing_class, plain = self.args, self.processing_class, self.data.plain
        if processing_class is None:
            by_name = isinstance(self.model, str)
            revision = (args.model_init_kwargs or {}).get("revision") if by_name else None
            trust = {"trust_remote_code": args.trust_remote_code}
            # `Agent` and `evaluate` load it so too; a class by the model's type might tokenise differently.
            processing_class = load_processor(model_name(self.model), revision, **trust)
        if self.data.messages is not None:
            check_template(processing_class, f" of `{self.data.messages}`")
        text = getattr(processing_class, "tokenizer", processing_class)
        # A text with special tokens was rendered before.
        if (
            plain
            and processing_class.chat_template
            and not any(mark in plain for mark in text.all_special_tokens)
        ):
            logger.warning(
                "Prompts are plain text (%.40r), so the chat template is not used. A chat model needs "
                "[{'role': 'user', 'content': prompt}].", plain,
            )  # fmt: skip
        return processing_class

    def _check_images(self, tokenizer: Any) -> None:
        """Refuse images without a processor, and what a processor is not supported with."""
        args, engine = self.args, self.args.distributed_state.distributed_type.value
        if not isinstance(tokenizer, ProcessorMixin):
            if self.data.images is not None:
                raise ValueError(f"{self.data.images} has images, and {TEXTS_ONLY}.")
            if args.max_images is not None:
                raise ValueError(f"`max_images` is {args.max_images}, and {TEXTS_ONLY}.")
            return
        reads = isinstance(self.model, str) or hasattr(self.model.config, "image_token_id")
        judges = any(isinstance(func, str | nn.Module) for func in self.rewards.funcs)
        unsupported = {
            f"`use_vllm={args.use_vllm}`": args.use_vllm,
            "`rollout_func`": self.rollout.user_func is not None,
            f"an engine other than DDP ({engine})": engine not in ("NO", "MULTI_CPU", "MULTI_GPU"),
            "a model that reads only text": not reads,
            "a reward model, which reads only text": judges,
        }
        for name, found in unsupported.items():
            if found:
                raise ValueError(
                    f"`processing_class` is a {type(tokenizer).__name__}, which reads images, and this is "
                    f"not supported with {name}. For text alone pass a tokenizer."
                )

    @contextmanager
    def building_upstream(self, trainer: GRPOTrainer) -> Iterator[None]:
        """Context manager around GRPOTrainer's constructor: set four options for it, then restore them.

        Upstream makes a reference only for `beta`, the loss-side KL; here the in-reward KL needs it too. If
        the caller passes a reference, upstream makes none, and this package syncs the given reference.
        """
        args, reference = self.args, self.reference
        options = {
            "beta": 1.0 if reference.by_upstream else 0.0,
            "sync_ref_model": args.sync_ref_model and reference.model is None,
            "reward_weights": self.rewards.weights(args.reward_weights),
            "enable_jit_checkpoint": False,
        }
        engine = colocated_engine(trainer, args, loaded_by_name=isinstance(self.model, str))
        with replaced(args, **options), engine:
            yield
        trainer.beta = args.beta
