"""A run that is only planned, and its memory: models without weights, read as a trainer's are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trl import ModelConfig, get_peft_config

from ..models.critic import Critic, NoCritic, SeparateCritic, SharedCritic
from ..models.memory import FITS, GIB, Setup, estimate
from ..models.shapes import QWEN25, critic_shape, modules_size, policy_shape, qwen25, read_setup
from ..trainer._trl import TORCH_TILE_TOKENS
from ..trainer.watching.memory import settings_of, shared_out
from .agent_models import critic_adapters, local_config, model_options
from .arguments import TrainArguments
from .launches import Launch

CARDS = (16, 24, 40, 48, 80, 141)


@dataclass
class Plan:
    """The run as far as it is known: flags, surroundings, rows; why its memory is not, if it is not.

    `on_cpu` where `use_cpu` is set: without it a run is planned for a card, also on a machine without.
    """

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    trainer_class: Any
    launch: Launch = field(default_factory=Launch)
    train: Any = None
    prompt: int = 0
    setup: Setup | str | None = None
    on_cpu: bool = False


def loaded_options(run: Plan) -> dict[str, Any]:
    """How the policy is loaded."""
    return model_options(run.model_args, run.config.model_init_kwargs)


# ---------------------------------------------------------------------------- memory


def known_config(name: str, revision: str | None = None, *, fetch: bool = False) -> Any:
    """Configuration of a model that is here, that the Hub has, or that is well known; else None."""
    size = re.fullmatch(r"Qwen/Qwen2\.5-([\d.]+B)(-Instruct)?", name)
    config = local_config(name, revision, fetch=fetch)
    if config is None and size is not None and size[1] in QWEN25 and not Path(name).exists():
        return qwen25(size[1])
    return config


def known_size(name: str, revision: str | None = None) -> int | None:
    """Bytes of a model in 16 bits; None where its shape is not known here."""
    config = known_config(name, revision)
    return None if config is None else modules_size([policy_shape(config, "bfloat16")])


def planned_setup(run: Plan, *, fetch: bool = False) -> Setup | str:
    """The run as the memory model takes it, or why that is not known.

    Args:
        run: as far as it is known.
        fetch: have shapes that are not here from the Hub: a file of a few lines, and no weights.

    Raises:
        ValueError: the adapters do not fit the model.
    """
    config, model_args = run.config, run.model_args
    name, value_model = model_args.model_name_or_path or "", config.value_model_name_or_path
    shapes = {name: known_config(name, model_args.model_revision, fetch=fetch)}
    if value_model is not None:
        shapes[value_model] = known_config(value_model, fetch=fetch)
    for missing in (name for name, shape in shapes.items() if shape is None):
        role = "critic " if missing == value_model else ""
        return f"the shape of {'the ' * bool(role)}{role}{missing} is not known on this machine"
    dtype = str(loaded_options(run).get("dtype"))
    dtype = dtype if dtype in ("bfloat16", "float16") else "float32"
    four_bit, peft_config = model_args.load_in_4bit, get_peft_config(model_args)
    policy = policy_shape(shapes[name], dtype, peft_config, four_bit=four_bit)
    critic = planned_critic(run, policy, shapes[value_model or name], dtype)
    if model_args.load_in_8bit:
        return "weights in 8 bits are not counted"
    if config.use_vllm and config.vllm_mode == "colocate":
        return (
            f"vLLM on the same card reserves a share of it "
            f"(vllm_gpu_memory_utilization={config.vllm_gpu_memory_utilization:g})"
        )
    own_reference = peft_config is None and (config.kl_coef or config.beta)
    settings = settings_of(config, run.prompt)
    if run.on_cpu:
        settings |= {"device": "cpu", "tile_tokens": TORCH_TILE_TOKENS}
    setup = read_setup(policy, critic, policy if own_reference else None, **settings)
    if four_bit and not model_args.use_bnb_nested_quant:
        weights = setup.geometry.four_bit_weights(setup.weight_bytes, double=False)
        setup = replace(setup, weights=weights)
    return shared_out(setup, run.launch.engine, run.launch.processes)


def planned_critic(run: Plan, policy: Any, shape: Any, dtype: str) -> Critic:
    """The critic that the flags ask for, without weights."""
    config, rank = run.config, run.args.value_model_lora_r
    if not run.trainer_class.has_critic:
        return NoCritic()
    if rank is not None:
        model = critic_shape(shape, "bfloat16" if config.bf16 else dtype)
        return SeparateCritic(critic_adapters(model, rank))
    if run.model_args.use_peft and config.value_model_name_or_path is None:
        return SharedCritic(policy, config.critic_lora_r)
    return SeparateCritic(critic_shape(shape, dtype))


def memory_rows(setup: Setup | str | None, engine: str) -> Iterator[tuple[str, str]]:
    """What the table of a dry run says of it."""
    if not isinstance(setup, Setup):
        yield "each process", f"not known: {setup or 'the models could not be planned'}"
        return
    expected = estimate(setup)
    rough = "" if engine in ("none", "DDP") else ", roughly: the engine's buffers are left out"
    peak = f"about {expected.peak / GIB:.1f} GiB at the peak ({expected.phase})"
    yield "each process", f"{peak}{rough}"
    yield "of that", expected.parts(expected.phase)
    if setup.device != "cpu":
        yield "smallest card", smallest_card(expected.peak)


def smallest_card(peak: int) -> str:
    """The smallest common card that holds a peak."""
    fitting = (f"{card} GB" for card in CARDS if peak <= FITS * card * GIB)
    return next(fitting, "none of the common ones")
