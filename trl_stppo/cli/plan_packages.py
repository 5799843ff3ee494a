"""Which optional packages a planned run would need and not find; for dry runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from .plan_rows import Plan, loaded_options

# Attention -> modules of which one must be there.
ATTENTION = {
    "flash_attention_2": ("flash_attn", "kernels"),
    "flash_attention_3": ("flash_attn_interface", "kernels"),
}
# Where logs go -> likewise; others are named as their module.
REPORTERS = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "kubeflow": (),
    "tensorboard": ("tensorboard", "tensorboardX"),
}
OF_BITSANDBYTES = ("paged_", "lion", "ademamix", "rmsprop_bnb", "adamw_8bit", "adamw_bnb")


def missing_packages(run: Plan) -> Iterator[tuple[str, bool]]:
    """What to say of each package that is missing here, and whether only another machine needs it."""
    for setting, modules in _needed(run):
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            yield (
                f"`{setting}` needs the package {' or '.join(modules)}, which is not installed here. "
                f"Install it, or change the setting.",
                # A launch that is read from a file may be meant for another machine.
                run.launch.pretended and modules == ("deepspeed",),
            )
    for name in _reporters(run):
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            yield f"`report_to={name}`: allowed are {known}, all and none.", False


def _needed(run: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    config, model_args = run.config, run.model_args
    attention = str(loaded_options(run).get("attn_implementation"))
    if attention in ATTENTION:
        yield f"attn_implementation={attention}", ATTENTION[attention]
    elif "/" in attention:
        yield f"attn_implementation={attention}", ("kernels",)
    if config.use_liger_kernel:
        yield "use_liger_kernel=True", ("liger_kernel",)
    if config.use_vllm:
        yield "use_vllm=True", ("vllm",)
    optim = str(getattr(config.optim, "value", config.optim))
    if optim.startswith(OF_BITSANDBYTES):
        yield f"optim={optim}", ("bitsandbytes",)
    for bits in ("load_in_4bit", "load_in_8bit"):
        if getattr(model_args, bits):
            yield f"{bits}=True", ("bitsandbytes",)
    if run.launch.engine.startswith("ZeRO"):
        yield "distributed_type=DEEPSPEED", ("deepspeed",)
    for name in _reporters(run):
        if name in INTEGRATION_TO_CALLBACK:
            yield f"report_to={name}", REPORTERS.get(name, (name,))


def _reporters(run: Plan) -> list[str]:
    given = run.config.report_to
    names = [given] if isinstance(given, str) else list(given or [])
    return [name for name in names if name not in ("none", "all")]
