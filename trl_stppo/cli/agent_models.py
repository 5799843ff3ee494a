"""Models that the flags name: loading options, critics, tokenizers."""

from __future__ import annotations

import threading
from typing import Any

from trl import ModelConfig

from ..hub.loading import load_tokenizer
from .usage import UsageError, check_name


def model_options(
    model_args: ModelConfig, init_kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the loading options of a checkpoint: `init_kwargs`, then flags that are not at their default."""
    options, unset = dict(init_kwargs or {}), ModelConfig()
    for flag in ("model_revision", "attn_implementation", "dtype"):
        name, value = flag.removeprefix("model_"), getattr(model_args, flag)
        if value is not None and (name not in options or value != getattr(unset, flag)):
            options[name] = value
    return options


def local_config(name: str | None, revision: str | None = None, *, fetch: bool = False) -> Any:
    """Return a model's configuration, from this machine or with `fetch` from the Hub; None if not found."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            name, revision=revision, local_files_only=not fetch, trust_remote_code=False
        )
    except Exception:
        return None


def check_policy(model_args: ModelConfig) -> None:
    """Reject a policy that is not set, does not exist, or cannot be trained."""
    if model_args.model_name_or_path is None:
        raise UsageError(
            "`--model_name_or_path` is not set: must be a checkpoint, or a model of the Hub."
        )
    check_name("model_name_or_path", model_args.model_name_or_path)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise UsageError("`load_in_4bit` and `load_in_8bit` need `use_peft: true`.")


def check_value_model(
    args: TrainArguments, training_args: Any, model_args: ModelConfig, trainer_class: Any
) -> None:
    """Reject a value model that does not exist, and a rank without a separate critic."""
    check_name("value_model_name_or_path", training_args.value_model_name_or_path)
    rank = args.value_model_lora_r
    if rank is None:
        return
    if not trainer_class.has_critic:
        raise ValueError(
            f"`value_model_lora_r={rank}`: must be None, `variant={training_args.variant!r}` has no critic."
        )
    if rank < 1:
        raise ValueError(f"`value_model_lora_r={rank}`: must be >= 1 or None.")
    if training_args.value_model_name_or_path is None and model_args.use_peft:
        raise ValueError(
            f"`value_model_lora_r={rank}` with `use_peft=True`: the critic of a LoRA policy shares its "
            f"weights. Set critic_lora_r, or value_model_name_or_path as well."
        )


def load_value_model(args: TrainArguments, training_args: Any, model_args: ModelConfig) -> Any:
    """Load the critic that is trained through adapters; None if the trainer makes its own."""
    if args.value_model_lora_r is None:
        return None
    from ..models.critic_models import critic_from_checkpoint
    from ..trainer.sharding.runtime import unpartitioned

    name = training_args.value_model_name_or_path or model_args.model_name_or_path
    training_args.value_model_name_or_path = None  # the loaded model replaces it
    options = model_options(model_args, training_args.model_init_kwargs)
    options.setdefault("trust_remote_code", training_args.trust_remote_code)
    if training_args.bf16:
        options["dtype"] = "bfloat16"  # its weights are frozen
    with unpartitioned():
        model = critic_from_checkpoint(name, **options)
    return critic_adapters(model, args.value_model_lora_r)


def critic_adapters(model: Any, rank: int) -> Any:
    """Add adapters to a critic's model."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        modules_to_save=["score"],
        task_type="SEQ_CLS",
    )
    model = get_peft_model(model, adapters)
    model.get_base_model().score.float()  # values need the precision
    return model


class TokenCounter:
    """Count the tokens of a text, for environments.

    It loads its own tokenizer on first use: the trainer changes the padding of the other one, which is not
    safe beside counting threads. Pickles hold the tokenizer's name only.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self._source = (name, revision)
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    def __call__(self, text: str) -> int:
        """Return the number of tokens, without special ones."""
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = load_tokenizer(*self._source)
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["_source"])  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> TokenCounter:
        return self  # all environments of a process share it
