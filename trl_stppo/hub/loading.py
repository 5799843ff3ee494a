"""From a folder to a model: full or an adapter on its base, without running code from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fetching import ADAPTER_CONFIG
from .settings import AgentSettings

# Names that `agent.json` may have for a dtype; what else it says is not looked up in torch.
DTYPES = ("float32", "float64", "float16", "bfloat16")
_CODES = dict(zip(("F32", "F64", "F16", "BF16"), DTYPES, strict=True))  # in safetensors
# Tokenizers that are all in their file.
PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def adapter_base(name: str | Path) -> str | None:
    """The base model of an adapter's folder; None where the folder holds no adapter."""
    folder = Path(name)
    return base_of(folder)[0] if (folder / ADAPTER_CONFIG).is_file() else None


def load_tokenizer(name: str | Path, revision: str | None = None, **options: Any) -> Any:
    """A policy's tokenizer, padded on the side that generation needs.

    Args:
        name: of a folder, or on the Hub; an adapter's folder without a tokenizer has its base model's.
        revision: on the Hub.
        **options: further arguments of `from_pretrained`; no code of the repository is run unless they
            have `trust_remote_code=True`.

    Raises:
        FileNotFoundError: there is no such folder, and the Hub gave none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Left unset, transformers asks in a terminal whether to run a repository's code.
    options = {
        "padding_side": "left",
        "truncation_side": "left",
        "trust_remote_code": False,
        **options,
    }
    folder = Path(name)
    file = folder / "tokenizer_config.json"
    if not file.is_file() and adapter_base(folder) is not None:
        base, of_base = base_of(folder)
        return AutoTokenizer.from_pretrained(base, revision=of_base, **options)
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    plain = (
        config.get("tokenizer_class") in PLAIN_TOKENIZERS and (folder / "tokenizer.json").is_file()
    )
    # By itself transformers would take the class that usually goes with the model, and with it
    # another way to split words.
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    try:
        return kind.from_pretrained(str(name), revision=revision, **options)
    except Exception as error:
        if folder.exists():
            raise
        raise FileNotFoundError(
            f"`{name}` is no folder here, and the Hub did not give a tokenizer of that name "
            f"({type(error).__name__}). Check the name, and the network."
        ) from error


def load_model(
    folder: Path,
    settings: AgentSettings,
    *,
    token: str | bool | None = None,
    quantization_config: Any = None,
    device: Any = None,
    dtype: Any = None,
    base_model: str | None = None,
    model_init_kwargs: dict[str, Any] | None = None,
) -> Any:
    """The policy in a folder, ready to generate.

    Args:
        folder: with the policy.
        settings: of its run.
        token: for a base model that is not public.
        quantization_config: of the base model; None as in the run, False for none.
        device: default the GPU where there is one.
        dtype: default as in the run.
        base_model: of an adapter, in place of what its configuration names.
        model_init_kwargs: of `from_pretrained`; no code of the repository is run unless they have
            `trust_remote_code=True`.

    Raises:
        ValueError: an adapter's base model is not to be had.
    """
    import torch
    from transformers import AutoModelForCausalLM

    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    quantized = _quantization(settings, quantization_config) if is_adapter else None
    if not is_adapter and quantization_config not in (None, False):
        quantized = quantization_config
    kwargs: dict[str, Any] = {
        "dtype": dtype or (settings.dtype if settings.dtype in DTYPES else "auto"),
        "trust_remote_code": False,
        **(model_init_kwargs or {}),
    }
    if quantized is not None:
        kwargs["quantization_config"] = quantized
    if is_adapter:
        base, revision = base_of(folder, base_model)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                base, **{"revision": revision, "token": token, **kwargs}
            )
        except OSError as error:
            raise ValueError(
                f"The adapter in `{folder}` belongs on {base!r}, which could not be loaded: {error} Pass "
                f"the base model's name or folder as `base_model`."
            ) from error
        model = with_adapter(model, folder, trainable=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(str(folder), **kwargs)
    placed = quantized is not None or getattr(model, "is_quantized", False)
    if "device_map" not in kwargs and not placed:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


def with_adapter(model: Any, folder: Path, *, trainable: bool) -> Any:
    """A PEFT model of a base and the adapter at the root of a folder, in the precision it was saved in."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(
        model, str(folder), is_trainable=trainable, autocast_adapter_dtype=False
    )
    # On quantised layers PEFT makes adapters in float32, whatever was saved.
    dtypes = _saved_dtypes(folder / "adapter_model.safetensors")
    for name, parameter in loaded.named_parameters():
        dtype = dtypes.get(name.replace(".default.", "."))
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
    return loaded


def _saved_dtypes(file: Path) -> dict[str, Any]:
    import torch
    from safetensors import safe_open

    if not file.is_file():
        return {}
    with safe_open(str(file), framework="pt") as tensors:  # its header alone is read
        codes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return {name: getattr(torch, _CODES[code]) for name, code in codes.items() if code in _CODES}


def base_of(folder: Path, base_model: str | None = None) -> tuple[str, str | None]:
    """Name and revision of the model that an adapter belongs on.

    Args:
        folder: of the adapter.
        base_model: to be taken in place of what the adapter names.

    Raises:
        ValueError: neither names one.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if base_model is not None:
        return base_model, None
    base = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"The adapter in `{folder}` does not name the model that it belongs on: that had no name "
            f"when it was trained. Pass `base_model`."
        )
    return base, config.get("revision")


def _quantization(settings: AgentSettings, given: Any) -> Any:
    """What to quantise the base with."""
    if given is not None:
        return given or None
    known = settings.quantization
    if not known or known.get("quant_method") not in (None, "bitsandbytes"):
        return None
    from transformers import BitsAndBytesConfig

    try:
        return BitsAndBytesConfig.from_dict(known)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"`quantization={known!r}` of the agent's settings is no configuration of bitsandbytes: "
            f"{error} Pass your own as `quantization_config`, or False for none."
        ) from error
