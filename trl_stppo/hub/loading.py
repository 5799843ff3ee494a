"""Load models (full models or adapters) and tokenizers without running code of a repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download

from ..errors import HubError
from ..paths import check_name
from .settings import AgentSettings

# The error for a cache that lacks files of a repository. Older versions of huggingface_hub do not have it.
INCOMPLETE: Any = getattr(errors, "IncompleteSnapshotError", ())
ADAPTER_CONFIG = "adapter_config.json"
_PLAIN = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
# These files are not downloaded: folders except `additional_chat_templates`, a second copy of the weights,
# the trainer's state.
_NOT = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*.safetensors", "trainer_state.json")
_OPTIONS: dict[str, Any] = {
    **{"padding_side": "left", "truncation_side": "left"},
    # transformers would otherwise prompt in a terminal.
    "trust_remote_code": False,
}
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def policy_folder(
    name: str, revision: str | None = None, token: str | bool | None = None, *, code: bool = False
) -> Path:
    """Return the folder `name`, or download policy, tokenizer and `agent.json` from the repository `name`.

    `code` downloads Python files as well. A failed download raises `HubError`.
    """
    if Path(name).is_dir():
        return Path(name)
    check_name("name_or_folder", name)
    wanted = [*_PLAIN, *(["*.py"] if code else [])]
    options: Any = {"allow_patterns": wanted, "ignore_patterns": list(_NOT)}
    try:
        return Path(snapshot_download(name, revision=revision, token=token, **options))
    except Exception as error:
        raise unreachable(name, revision, error) from error


def unreachable(name: str, revision: str | None, error: Exception) -> HubError:
    """Return the error for a repository that cannot be downloaded."""
    at = f" at revision {revision!r}" if revision else ""
    return HubError(
        f"{name!r}{at} is no folder here and could not be downloaded: {error} Check name and revision; a "
        f"private repository needs `hf auth login`. A second try continues the download."
    )


def critic_folder(
    name: str, subfolder: str, revision: str | None = None, token: str | bool | None = None
) -> Path | None:
    """Return the folder of the critic published with a policy, or None if there is no critic.

    Raises:
        HubError: the repository exists, but its critic could not be downloaded.
    """
    # List the configurations too, because huggingface_hub warns if no file matches.
    wanted = [f"{subfolder}/*", "config.json", ADAPTER_CONFIG]
    found = name
    if not Path(name).is_dir():
        try:
            found = snapshot_download(name, revision=revision, token=token, allow_patterns=wanted)
        except Exception as error:
            absent = isinstance(error, errors.LocalEntryNotFoundError)
            if absent and not isinstance(error, INCOMPLETE):
                # The Hub is out of reach and no file is cached, so loading the model fails too.
                return None
            raise unreachable(name, revision, error) from error
    folder = Path(found) / subfolder
    return folder if folder.is_dir() else None


def load_processor(name: str | Path, revision: str | None = None, **options: Any) -> Any:
    """Load a policy's processor, or the tokenizer of a policy that reads only text; see `load_tokenizer`."""
    from transformers import AutoProcessor, ProcessorMixin

    folder = Path(name)
    if not (folder / "tokenizer_config.json").is_file() and (folder / ADAPTER_CONFIG).is_file():
        return load_processor(*base_of(folder), **options)
    if not folder.is_dir() or any((folder / file).is_file() for file in PROCESSOR_FILES):
        check_name("name", str(name))
        found = AutoProcessor.from_pretrained(str(name), revision=revision, **_OPTIONS | options)
        if isinstance(found, ProcessorMixin):
            return found
    # AutoProcessor chooses a tokenizer's class otherwise than `load_tokenizer`.
    return load_tokenizer(name, revision, **options)


def load_tokenizer(name: str | Path, revision: str | None = None, **options: Any) -> Any:
    """Load a policy's tokenizer, padded on the left for generation.

    For an adapter's folder without a tokenizer, the base model's tokenizer is loaded. `options` are arguments
    of `from_pretrained`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_name("name", str(name))
    options, folder = _OPTIONS | options, Path(name)
    file = folder / "tokenizer_config.json"
    if not file.is_file() and (folder / ADAPTER_CONFIG).is_file():
        return load_tokenizer(*base_of(folder), **options)
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    plain = config.get("tokenizer_class") in PLAIN_TOKENIZERS
    plain = plain and (folder / "tokenizer.json").is_file()
    # AutoTokenizer would choose the class of the model type, which may tokenise differently.
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    return kind.from_pretrained(str(name), revision=revision, **options)


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
    """Load the policy in `folder` for generation. For the arguments see `Agent.from_pretrained`."""
    import torch

    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    quantized = quantization_config or None
    if is_adapter and quantization_config is None:
        quantized = _quantization(settings)
    kwargs: dict[str, Any] = {
        "dtype": dtype or settings.dtype or "auto",
        "trust_remote_code": False,
        **(model_init_kwargs or {}),
    }
    if quantized is not None:
        kwargs["quantization_config"] = quantized
    if is_adapter:
        try:
            base, revision = base_of(folder, base_model)
            model = _loaded(base, {"revision": revision, "token": token, **kwargs})
        except OSError as error:
            raise ValueError(
                f"The base model of the adapter in `{folder}` could not be loaded; set `base_model`. {error}"
            ) from error
        model = with_adapter(model, folder, trainable=False)
    else:
        model = _loaded(str(folder), kwargs)
    placed = quantized is not None or getattr(model, "is_quantized", False)
    if "device_map" not in kwargs and not placed:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


def _loaded(name: str, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    known = {key: options.get(key) for key in ("revision", "token", "trust_remote_code")}
    return model_class(AutoConfig.from_pretrained(name, **known)).from_pretrained(name, **options)


def model_class(config: Any) -> Any:
    """Return the class that loads the model of a configuration, with its vision tower if there is one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    seeing = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    sees = not {*seeing}.isdisjoint(config.architectures or [])
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def with_adapter(model: Any, folder: Path, *, trainable: bool) -> Any:
    """Put the adapter of a folder onto a base model, in the saved precision."""
    from peft import PeftModel
    from safetensors.torch import load_file

    options = {"is_trainable": trainable, "autocast_adapter_dtype": False}
    loaded = PeftModel.from_pretrained(model, str(folder), **options)
    # Restore the saved dtypes, because PEFT makes float32 adapters on quantised layers.
    file = folder / "adapter_model.safetensors"
    saved = load_file(file) if file.is_file() else {}
    for name, parameter in loaded.named_parameters():
        if (weight := saved.get(name.replace(".default.", "."))) is not None:
            parameter.data = parameter.data.to(weight.dtype)
    return loaded


def base_of(folder: Path, base_model: str | None = None) -> tuple[str, str | None]:
    """Return the name and revision of an adapter's base model. `base_model` replaces the saved name."""
    if base_model is not None:
        check_name("base_model", base_model)
        return base_model, None
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"The adapter in `{folder}` names no base model. Set `base_model`.")
    check_name("base_model_name_or_path", base)
    return base, config.get("revision")


def _quantization(settings: AgentSettings) -> Any:
    """Return the quantization config that the run had for an adapter's base model, or None."""
    from transformers import BitsAndBytesConfig

    known = settings.quantization
    if not known or known.get("quant_method") not in (None, "bitsandbytes"):
        return None
    return BitsAndBytesConfig.from_dict(known)
