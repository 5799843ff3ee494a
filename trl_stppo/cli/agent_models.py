"""Models as the flags name them: how checkpoints load, critics, tokenizers."""

from __future__ import annotations

import threading
from typing import Any

from trl import ModelConfig

from ..hub.loading import load_tokenizer
from .usage import UsageError, check_name


def model_options(model_args: ModelConfig, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """How a checkpoint is loaded.

    Args:
        model_args: flags.
        given: `model_init_kwargs`. A flag that has been set wins over it; one that is at its default
            does not.
    """
    names = {
        "revision": "model_revision",
        "attn_implementation": "attn_implementation",
        "dtype": "dtype",
    }
    options, unset = dict(given or {}), ModelConfig()
    for name, flag in names.items():
        value = getattr(model_args, flag)
        if value is not None and (name not in options or value != getattr(unset, flag)):
            options[name] = value
    return options


def local_config(name: str | None, revision: str | None = None, *, fetch: bool = False) -> Any:
    """A model's configuration where it is on this machine, or with `fetch` on the Hub; else None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            name, revision=revision, local_files_only=not fetch, trust_remote_code=False
        )
    except Exception:
        return None


def check_policy(model_args: ModelConfig) -> None:
    """Refuse a policy that is not named, is not there, or cannot be trained."""
    if model_args.model_name_or_path is None:
        raise UsageError("`--model_name_or_path` is missing: a checkpoint, or a model of the Hub.")
    check_name("model_name_or_path", model_args.model_name_or_path)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise UsageError(
            "A model in 4 or 8 bits cannot be trained itself. Set `use_peft: true`, or load it whole."
        )


class TokenCounter:
    """Counts the tokens of a text, for environments that know no tokenizer.

    It loads a tokenizer of its own, on first use: the trainer's is set to pad and to cut while others
    count, which its library does not allow from two threads. Travels to other processes by name.

    Args:
        name: of the tokenizer, or its folder.
        revision: of the Hub's.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self._source = (name, revision)
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    def __call__(self, text: str) -> int:
        """Number of tokens, without special ones."""
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
