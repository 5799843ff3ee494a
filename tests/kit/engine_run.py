"""Small trainings under every engine, on two processes without a GPU; rank 0 saves what came out.

Started by `test_engines.py` through torch.distributed.run with a folder, the names of the
engines and the names of the cases.

Accelerate builds FSDP2 and counts DeepSpeed's processes only where it finds GPUs. `engine` lets it
find two whose tensors lie on the CPU and that talk through gloo; from there on everything is the code
that runs on GPUs.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.commands import launch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    Qwen2ForCausalLM,
    TrainerCallback,
    training_args,
)
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

from tests.kit.builders import with_estimator
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_config, tiny_policy, tiny_value_model
from tests.kit.scripted import DEFAULTS, EPISODES, logged, scripted_trainer
from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.trainer.stabilizers import STABILIZERS, TrustRegion, register

CONFIGS = Path(__file__).parents[2] / "trl_stppo" / "cli" / "accelerate_configs"
ENGINES = ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
LORA = {"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
SETTINGS = {
    "variant": "turn-ppo",
    "max_steps": 3,
    "num_ppo_epochs": 3,
    "per_device_train_batch_size": EPISODES // 4,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    # Adam would enlarge the rounding of gradients that are 0.
    "adam_epsilon": 1e-3,
    "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}
# Policy and critic, then options; "critic" is None for what the trainer makes itself.
CASES: dict[str, dict[str, Any]] = {
    "full, copied": {},
    "full, named": {"critic": "named"},
    "full, given": {"critic": "given"},
    "LoRA, shared": {"lora": True},
    "LoRA, named": {"lora": True, "critic": "named"},
    "LoRA, given": {"lora": True, "critic": "given"},
    # With more options, each on a combination that most engines train.
    "policy by name": {"policy_named": True, "critic": "named"},
    "policy by name, LoRA": {"policy_named": True, "critic": "named", "lora": True},
    "critic from a causal model": {"critic": "named policy"},
    "critic in pieces": {"critic": "loaded late"},
    "critic in pieces, LoRA": {"critic": "loaded late, LoRA", "lora": True},
    "tied embeddings": {"critic": "given", "tied": True},
    "checkpointed layers": {"critic": "given", "gradient_checkpointing": True, "beta": 0.1},
    "checkpointed layers, LoRA": {"critic": "given", "lora": True, "gradient_checkpointing": True},
    "checkpointed layers, LoRA, shared": {"lora": True, "gradient_checkpointing": True},
    "fused Adam": {"critic": "given", "optim": "adamw_torch_fused"},
    "warm-up": {"critic": "given", "critic_warmup_steps": 3, "max_steps": 6},
    "played": {"critic": "given", "played": True, "num_ppo_epochs": 2, "max_steps": 4},
    "played, LoRA": {"critic": "given", "lora": True, "played": True, "max_steps": 4},
    "played, LoRA, shared": {
        "lora": True, "played": True, "max_steps": 6, "critic_warmup_steps": 3,
    },
    "trained adapter, its copy as reference": {
        "critic": "given", "lora": True, "trained_adapter": True, "kl_coef": 0.1, "beta": 0.1,
    },
    "evaluated": {
        "critic": "given", "played": True, "eval_strategy": "steps", "eval_steps": 1, "rows": 5,
    },
    "corrected": {
        "critic": "given", "variant": "st-ppo", "clip_bias_estimator": "logits",
    },
    "corrected, LoRA": {
        "lora": True, "critic": "named", "variant": "st-ppo",
        "clip_bias_estimator": "logits",
    },
    "scaled updates": {
        "critic": "given", "variant": "s-ppo", "stabilizers": ["scripted"],
        "clip_bias_estimator": "logits",
    },
    "scaled updates, LoRA": {
        "lora": True, "critic": "named", "variant": "s-ppo", "stabilizers": ["scripted"],
        "clip_bias_estimator": "logits",
    },
    "step that follows the KL": {
        "critic": "given", "variant": "s-ppo", "stabilizers": ["trust_region"], "num_ppo_epochs": 2,
        "max_steps": 6, "desired_kl": 1e-6, "staleness": 0.0, "clip_bias_estimator": "logits",
    },
    # DeepSpeed cannot leave a step out: it takes one of rate 0.
    "step refused": {
        "critic": "given", "variant": "s-ppo", "stabilizers": ["trust_region"], "num_ppo_epochs": 4,
        "max_steps": 8, "desired_kl": 1e-6, "staleness": 0.0, "clip_bias_estimator": "logits",
        "least_turns": 4,
    },
    "quantised, LoRA": {"lora": True, "quantised": True},
    "quantised critic, LoRA": {"lora": True, "critic": "quantised"},
    # Generated by TRL's own call, which all processes must make together where weights are in pieces.
    "played by TRL": {
        "critic": "given", "played": True, "max_steps": 4, "num_ppo_epochs": 2,
        "generation_kwargs": {"do_sample": False, "no_repeat_ngram_size": 2},
    },
    # The second step is left out, in the first one for what one process has.
    "critic not finite": {
        "critic": "given", "critic_warmup_steps": 6, "max_steps": 4, "event": "not finite",
    },
    "rests": {"critic": "given", "max_steps": 4, "event": "rests"},
    "resumed": {"critic": "given", "resumed": True, "max_steps": 6},
    "resumed, LoRA": {"critic": "given", "lora": True, "resumed": True, "max_steps": 6},
    "resumed, LoRA, shared": {"lora": True, "resumed": True, "max_steps": 6},
    "resumed, other settings": {
        "critic": "given", "resumed": True, "max_steps": 6, "changed": {
            "learning_rate": 3e-3, "critic_learning_rate": 3e-2, "weight_decay": 0.5,
            "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-2,
        },
    },
    # Longer steps: DeepSpeed's weights are seen as bfloat16 rounds them.
    "bfloat16": {"critic": "given", "bf16": True},
    "bfloat16, LoRA": {"lora": True, "bf16": True},
    "bfloat16, resumed": {
        "critic": "given", "bf16": True, "resumed": True, "max_steps": 6,
    },
}  # fmt: skip


@contextmanager
def engine(name: str, precision: str = "no") -> Iterator[dict[str, Any]]:
    """Surroundings in which `accelerate launch` would start the engine; settings that go with them."""
    if name == "DDP":
        yield {"ddp_backend": "gloo"}
        return

    def two_gpus(*args: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    surroundings = {
        **launcher_environment(CONFIGS / f"{name.lower().replace('-', '')}.yaml"),
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    with (
        mock.patch.object(PartialState, "_prepare_backend", two_gpus),
        mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True),
        mock.patch.dict(os.environ, surroundings),
    ):
        yield {"use_cpu": False, "dataloader_pin_memory": False}
    unset_hf_deepspeed_config()


def launcher_environment(path: Path) -> dict[str, str]:
    """What `accelerate launch --config_file` tells the processes that it starts."""
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, _, _ = launch._validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    if args.use_deepspeed:
        told = prepare_deepspeed_cmd_env(args)[1]
    else:
        told = prepare_multi_gpu_env(args)
    return {key: value for key, value in told.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


LEAST_TURNS = TrustRegion.least_turns


class Scripted(TrustRegion):
    """Factors on the first steps, one after the other, and no limit."""

    name, meaning = "scripted", "scales the first steps by given factors"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factors = [0.5, 1.0, 0.25]

    @property
    def factor(self) -> float:
        return self.factors.pop(0) if self.factors else 1.0

    @property
    def exceeds(self) -> bool:
        return False


class Weights(TrainerCallback):
    """Whole weights of policy and critic before the training and after every step."""

    def __init__(self) -> None:
        self.trainer: STPPOTrainer | None = None
        self.after: list[dict[str, Tensor]] = []

    def _take(self) -> None:
        trainer = self.trainer
        critic = trainer.critic.parameters()
        inside = {id(p) for p in critic}
        policy = trainer.accelerator.unwrap_model(trainer.model)
        named = {n: p for n, p in policy.named_parameters() if id(p) not in inside}
        taken = {f"policy/{n}": whole(p) for n, p in named.items()}
        self.after.append(taken | {f"critic/{i}": whole(p) for i, p in enumerate(critic)})

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._take()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._take()


class Event(TrainerCallback):
    """Has the second step of a training left out."""

    def __init__(self, name: str) -> None:
        self.trainer: STPPOTrainer | None = None
        self.name, self.vf_coef = name, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and self.name == "rests":
            loop = self.trainer._loop
            opened = loop.open_mini_batch

            def empty(parts: list[Any]) -> Any:
                loop.open_mini_batch = opened
                nothing = torch.zeros(())
                return replace(opened(parts), policy_tokens=nothing, value_tokens=nothing)

            loop.open_mini_batch = empty
        if state.global_step == 1 and self.name == "not finite" and os.environ["RANK"] == "1":
            self.vf_coef, args.vf_coef = args.vf_coef, math.nan

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if math.isnan(args.vf_coef):
            args.vf_coef = self.vf_coef


def whole(parameter: nn.Parameter) -> Tensor:
    """A copy of a parameter, put together if it is in pieces."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    value = parameter.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def build(folder: Path, options: dict[str, Any], **settings: Any) -> tuple[STPPOTrainer, Weights]:
    """The trainer of a case."""
    options, tokenizer = dict(options), char_tokenizer()
    torch.manual_seed(0)
    policy: Any = tiny_policy(tokenizer)
    if options.pop("tied", False):
        policy = Qwen2ForCausalLM(tiny_config(tokenizer, tie_word_embeddings=True))
    critic = options.pop("critic", None)
    arguments: dict[str, Any] = {"model": policy, "value_model": None}
    if critic == "given":
        arguments["value_model"] = tiny_value_model(tokenizer)
    if isinstance(critic, nn.Module):
        arguments["value_model"] = critic
    if critic in ("named", "named policy"):
        name = "policy" if critic == "named policy" else "critic"
        arguments["value_model"] = str(named_model(folder.parent, name))
    torch.manual_seed(0)
    if options.pop("lora", False):
        arguments["peft_config"] = LoraConfig(**LORA)
    if options.pop("quantised", False):
        arguments["model"] = str(named_model(folder.parent, "policy"))
        arguments["quantization_config"] = FOUR_BITS
    if options.pop("policy_named", False):
        arguments["model"] = str(named_model(folder.parent, "policy"))
    if options.pop("trained_adapter", False):
        arguments["model"] = get_peft_model(policy, arguments.pop("peft_config"))
        for name, parameter in arguments["model"].named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    weights, played = Weights(), options.pop("played", False)
    TrustRegion.least_turns = options.pop("least_turns", LEAST_TURNS)
    if "stabilizers" in options and "scripted" not in STABILIZERS:
        register(Scripted)
    settings = {**SETTINGS, **options, **settings}
    event = Event(settings.pop("event", ""))
    if critic in ("loaded late", "loaded late, LoRA"):
        args = with_estimator(STPPOConfig, {"output_dir": str(folder), **DEFAULTS, **settings})
        arguments["value_model"] = loaded_critic(folder, lora=critic.endswith("LoRA"))
        in_pieces = [hasattr(p, "ds_id") for p in arguments["value_model"].parameters()]
        assert any(in_pieces) == is_deepspeed_zero3_enabled()
        del args
    if critic == "quantised":
        arguments["value_model"] = loaded_critic(folder, lora=True, quantization_config=FOUR_BITS)
    if eval_rows := settings.pop("rows", 0):
        arguments["eval_dataset"] = conversations(eval_rows)
    if played:
        trainer = _playing(folder, arguments, settings, weights)
    else:
        trainer, _ = scripted_trainer(folder, trainer_class=STPPOTrainer, **arguments, **settings)
        # Its recorder knows nothing of pieces.
        trainer.callback_handler.callbacks = [
            c for c in trainer.callback_handler.callbacks if type(c).__name__ != "Recorder"
        ]
        trainer.add_callback(weights)
    weights.trainer = event.trainer = trainer
    trainer.add_callback(event)
    return trainer, weights


def loaded_critic(folder: Path, *, lora: bool, **options: Any) -> Any:
    """A critic from a file."""
    name = named_model(folder.parent, "policy" if options else "critic")
    torch.manual_seed(0)
    load = AutoModelForSequenceClassification.from_pretrained
    model: Any = load(name, num_labels=1, **options)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**{**LORA, "task_type": "SEQ_CLS"})) if lora else model


def named_model(folder: Path, name: str) -> Path:
    """Where each process finds the model of that name."""
    return folder / f"{name}-{os.environ.get('RANK', 0)}"


def save_named_models(folder: Path) -> None:
    """A critic, and a policy wide enough to be quantised in blocks of 64 values."""
    tokenizer = char_tokenizer()
    tiny_value_model(tokenizer).save_pretrained(named_model(folder, "critic"))
    torch.manual_seed(0)
    config = tiny_config(tokenizer, hidden_size=64, intermediate_size=64)
    Qwen2ForCausalLM(config).save_pretrained(named_model(folder, "policy"))


def conversations(count: int) -> Dataset:
    """Rows of one message each."""
    letters = "abcdefgh"[:count]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in letters]})


def _playing(folder: Path, arguments: Any, settings: Any, weights: Weights) -> STPPOTrainer:
    """A trainer that samples its episodes itself, of turns that differ in number."""
    return STPPOTrainer(
        args=with_estimator(
            STPPOConfig,
            {
                **{"output_dir": str(folder), **DEFAULTS, **settings},
                **{"max_completion_length": 48, "max_turn_tokens": 6},
            },
        ),
        train_dataset=conversations(EPISODES),
        processing_class=char_tokenizer(),
        environment_factory=RaggedEnv,
        callbacks=[weights],
        **arguments,
    )


class RaggedEnv(CountEnv):
    """One turn on the first process and three on the second, so that they sample unequally often."""

    def reset(self, **row: object) -> tuple[str, dict]:
        self.turns = 1 + 2 * int(os.environ.get("RANK", 0))
        return super().reset(**row)


def run(name: str, case: str, folder: Path) -> dict[str, Any]:
    """One training; its weights, or the error that the constructor raised."""
    options = dict(CASES[case])
    resumed, changed = options.pop("resumed", False), options.pop("changed", {})
    with engine(name, "bf16" if options.get("bf16") else "no") as chosen:
        options |= chosen
        try:
            trainer, weights = build(folder, options, **_saving(resumed))
        except ValueError as error:
            return {"error": str(error)}
        split_all(trainer)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        assert trainer.accelerator.num_processes == world
        trainer.train()
        after = first_run = weights.after
        steps = trainer.args.steps_per_rollout
        if resumed:
            trainer.save_model(str(folder / "final"))
            trainer.accelerator.wait_for_everyone()
            del trainer, weights
            gc.collect()
            unset_hf_deepspeed_config()
            again, weights = build(folder, {**options, **changed}, **_saving(True))
            split_all(again)
            # The end of the first update.
            again.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps}"))
            after = after[: steps + 1] + weights.after[1:]
    saved = _saved(folder / "final") if resumed else {}
    norms, refused = (logged(weights.trainer, n) for n in ("value/grad_norm", "step/refused"))
    return {
        "after": after, "saved": saved, "first_run": first_run[-1], "norms": norms,
        "refused": refused,
    }  # fmt: skip


def split_all(trainer: STPPOTrainer) -> None:
    """Settings of DeepSpeed for small weights: several exchanges per pass, and nothing left whole."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        zero = plugin.deepspeed_config["zero_optimization"]
        zero |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2000}


def _saved(folder: Path) -> dict[str, Tensor]:
    """The policy that `save_model` has written, under the names of its parameters."""
    whole_model, adapter = folder / "model.safetensors", folder / "adapter_model.safetensors"
    if whole_model.exists():
        return {f"policy/{name}": value for name, value in load_file(whole_model).items()}
    return {
        f"policy/{name.removesuffix('.weight')}.default.weight": value
        for name, value in load_file(adapter).items()
    }


def _saving(resumed: bool) -> dict[str, Any]:
    return {"save_strategy": "steps", "save_steps": 1} if resumed else {}


def main() -> None:
    folder, names, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    # Before there are processes that know of each other: then only the first one would write.
    save_named_models(folder)
    results = {}
    for name in names:
        for case in cases:
            results[name, case] = run(name, case, folder / f"{name} {case}")
            gc.collect()
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
