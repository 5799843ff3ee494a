"""Optional packages that a setting asks for, looked for before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..ppo_config import PPOConfig

BITSANDBYTES = "bitsandbytes"
# How the names of those of transformers' optimizers begin that are bitsandbytes' own.
ITS_OPTIMIZERS = ("adamw_8bit", "adamw_bnb", "ademamix", "lion", "paged_", "rmsprop_bnb")


def check_packages(args: PPOConfig, model: Any, quantization_config: Any) -> None:
    """Refuse what needs bitsandbytes where it is not installed.

    Raises:
        ImportError: naming the setting, the package and how to install it.
    """
    if find_spec(BITSANDBYTES) is not None:
        return
    reasons = []
    given = (args.model_init_kwargs or {}).get("quantization_config")
    for name, config in (
        ("quantization_config", quantization_config),
        ("model_init_kwargs['quantization_config']", given),
        ("model.config.quantization_config", getattr(model, "config", None)),
    ):
        reasons += [f"`{name}` asks for {key}" for key in quantised(config)]
    optim = str(getattr(args.optim, "value", args.optim)).lower()
    if optim.startswith(ITS_OPTIMIZERS):
        reasons.append(f"`optim={optim!r}` is one of its optimizers")
    if reasons:
        raise ImportError(
            f"bitsandbytes is not installed, and {'; '.join(reasons)}. Install it with "
            f"`pip install bitsandbytes`, or leave the setting out."
        )


def quantised(config: Any) -> list[str]:
    """How bitsandbytes packs weights, by a model's configuration or one of quantisation."""
    config = getattr(config, "quantization_config", config)
    ask = config.get if isinstance(config, dict) else lambda key: getattr(config, key, False)
    return [key for key in ("load_in_4bit", "load_in_8bit") if ask(key)]
