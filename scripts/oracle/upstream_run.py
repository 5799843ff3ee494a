"""Runs TRL 1.12's ``PPOTrainer`` on tiny models and writes the fixture; see ``make_oracle.py``."""

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from recorder import Recorder, UpdateDoneError, spy_on_whitening
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback, set_seed
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.kit.oracle import build_models, new_model

PAD, EOS, UNK = 0, 1, 2
MODEL = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
TOKENIZER = {"vocab_size": 64, "pad_token_id": PAD, "eos_token_id": EOS, "unk_token_id": UNK}
PPO = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "total_episodes": 24,
    "response_length": 12,
    "temperature": 0.7,
    "stop_token": None,
    "missing_eos_penalty": None,
    "kl_estimator": "k1",
    "kl_coef": 0.05,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "whiten_rewards": False,
}
# Plain SGD over policy and value parameters: unlike Adam's, its step shows the gradient's scale.
VARIANTS = {
    "one_epoch": {"ppo": {"num_ppo_epochs": 1, "gamma": 1.0}, "lr": 0.05},
    "two_epochs": {"ppo": {"num_ppo_epochs": 2, "gamma": 0.99}, "lr": 0.05},
}
PROMPT_LENGTHS = (5, 7)
ROWS = 24


def _initial_weights(seed: int) -> dict[str, Tensor]:
    """Draws the float32 weights of the four models; the reference is a perturbed policy."""
    torch.manual_seed(seed)
    weights = {}
    for kind in ("policy", "value", "reward"):
        weights[kind] = new_model(kind, MODEL, torch.float32).state_dict()
    noisy = {k: v + 0.02 * torch.randn_like(v) for k, v in weights["policy"].items()}
    weights["ref"] = noisy
    return {f"init/{kind}/{k}": v for kind, state in weights.items() for k, v in state.items()}


def _prompts(seed: int) -> Dataset:
    """Returns a dataset of unpadded ``input_ids`` of two lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(ROWS)]
    low, high = UNK + 1, MODEL["vocab_size"]
    ids = [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids})


def _run(settings: dict[str, Any], init: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Runs the first update of the upstream trainer and returns what was recorded."""
    set_seed(seed)  # upstream leaves NumPy's generator, which orders the mini-batch, unseeded
    models = build_models((init, settings))
    recorder = Recorder(models.policy, models.value)
    parameters = [*models.policy.parameters(), *models.value.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=settings["optimizer"]["lr"])
    optimizer.register_step_pre_hook(recorder.before_step)
    optimizer.register_step_post_hook(recorder.after_step)

    class Stop(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.end_of_update()

    with tempfile.TemporaryDirectory() as folder, spy_on_whitening(ppo_trainer, recorder):
        args = PPOConfig(
            output_dir=folder,
            seed=seed,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            num_sample_generations=0,
            **settings["ppo"],
        )
        trainer = PPOTrainer(
            args=args,
            processing_class=models.tokenizer,
            model=models.policy,
            ref_model=models.ref,
            reward_model=models.reward,
            value_model=models.value,
            train_dataset=_prompts(seed),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            callbacks=[Stop()],
        )
        try:
            trainer.train()
        except UpdateDoneError:
            return recorder.tensors
    raise RuntimeError("The upstream trainer ended without finishing an update.")


def record(output: Path, seed: int) -> None:
    """Records all runs and writes the fixture and its settings.

    Args:
        output: Safetensors file to write; the settings go beside it with the suffix ``.json``.
        seed: Seed of weights, prompts and sampling.
    """
    tensors = init = _initial_weights(seed)
    shared = {"model": MODEL, "tokenizer": TOKENIZER}
    shared["versions"] = {name: version(name) for name in ("trl", "transformers", "torch")}
    variants = {}
    for name, variant in VARIANTS.items():
        variants[name] = {
            "ppo": PPO | variant["ppo"],
            "optimizer": {"class": "SGD", "lr": variant["lr"], "momentum": 0.0},
        }
        recorded = _run(shared | variants[name], init, seed)
        tensors = tensors | {f"{name}/{key}": value for key, value in recorded.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output)
    text = json.dumps(shared | {"seed": seed, "variants": variants}, indent=2)
    output.with_suffix(".json").write_text(text + "\n")
    print(f"{len(tensors)} tensors, {output.stat().st_size / 1e6:.2f} MB: {output}")
