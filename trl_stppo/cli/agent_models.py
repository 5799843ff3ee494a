"""Models that the flags name: loading options, checks, token counts."""

from __future__ import annotations

import threading
from typing import Any

from trl import ModelConfig

from ..hub.loading import load_tokenizer
from ..paths import check_name
from .usage import UsageError


def model_options(
    model_args: ModelConfig, init_kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a model's loading options: `init_kwargs`, overridden by flags that are not at their default."""
    options, unset = dict(init_kwargs or {}), ModelConfig()
    for flag in ("model_revision", "attn_implementation", "dtype"):
        name, value = flag.removeprefix("model_"), getattr(model_args, flag)
        if value is not None and (name not in options or value != getattr(unset, flag)):
            options[name] = value
    return options


def check_models(model_args: ModelConfig, critic: str | None, has_critic: bool) -> None:
    """Reject a policy that is not set or cannot be trained, and models that do not exist."""
    if critic is not None and not has_critic:
        raise UsageError(f"`value_model_name_or_path={critic}`: the variant has no critic.")
    check_name("value_model_name_or_path", critic)
    if model_args.model_name_or_path is None:
        raise UsageError("`--model_name_or_path` is not set: must name a model.")
    check_name("model_name_or_path", model_args.model_name_or_path)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise UsageError("`load_in_4bit` and `load_in_8bit` need `use_peft: true`.")


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
        """Return the number of tokens in a text, without special tokens."""
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
        # All environments of a process share it.
        return self
