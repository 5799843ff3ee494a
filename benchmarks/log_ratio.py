"""The log ratio of a policy that has not moved, with packed and with padded passes.

An episode's old log-probabilities come from one pass and those of the loss from another, over other rows.
In exact arithmetic they are equal. The model itself samples the tokens. Two mini-batches are trained for two
epochs at a learning rate of 0, and every log ratio of their losses is rounding.

    python benchmarks/log_ratio.py            # SmolLM2-135M, after `make pretrained`; minutes
    python benchmarks/log_ratio.py --quick    # a tiny model

The last line is JSON with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from _episodes import QUIET, fixed
from _outcome import finish
from geometries import SMOLLM2, lora, save_random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.core import log_importance_ratio, turn_starts
from trl_stppo.watch.lines import ProgressLines

EPISODES, LONGEST = 4, 40
PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle on the beach."


def sampled_episodes(model: str) -> list[dict[str, Any]]:
    """Sample the episodes from the model itself; the first ones are cut short."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids.repeat(EPISODES, 1)
    torch.manual_seed(0)
    rows = policy.generate(
        prompt, do_sample=True, max_new_tokens=LONGEST, min_new_tokens=LONGEST, pad_token_id=0
    )
    episodes = []
    for number, row in enumerate(rows.tolist()):
        ids = row[prompt.size(1) :][: LONGEST * (number + 1) // EPISODES]
        turn = {"completion_ids": ids, "turn_spans": [[0, len(ids)]]}
        episodes.append({"prompt_ids": row[: prompt.size(1)], **turn})
    return episodes


def measure(model: str, folder: str, *, half: bool, packed: bool) -> dict[str, float]:
    """Return sizes of the log ratios in nats, per token and per turn, and the clip range."""
    torch.manual_seed(0)
    trainer = STPPOTrainer(
        **fixed(model, sampled_episodes(model)),
        args=STPPOConfig(
            output_dir=folder,
            per_device_train_batch_size=EPISODES // 2,
            gradient_accumulation_steps=1,
            steps_per_generation=2,
            num_iterations=2,
            max_steps=4,
            max_completion_length=LONGEST,
            learning_rate=0.0,
            critic_learning_rate=0.0,
            kl_coef=0.01,
            bf16=half,
            use_cpu=True,
            model_init_kwargs={"dtype": "float32"},
            **QUIET,
        ),
        peft_config=lora(),
    )
    trainer.remove_callback(ProgressLines)
    if not packed:
        trainer._forward.why_padded = "This run measures padded passes."
    tokens: list[torch.Tensor] = []
    turns: list[torch.Tensor] = []
    original = trainer._loop.policy_loss

    def policy_loss(model: Any, inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            logprobs = trainer._loop.forward.policy(model, inputs)[0]
            ratio, mask = logprobs - inputs["old_per_token_logps"], inputs["loss_mask"]
            tokens.append(ratio[mask].abs().float())
            level = log_importance_ratio(
                logprobs,
                inputs["old_per_token_logps"],
                inputs["turn_index"],
                trainer.importance_sampling_level,
                loss_mask=mask,
            )
            turns.append(level[turn_starts(inputs["turn_index"]) & mask].abs().float())
        return original(model, inputs)

    trainer._loop.policy_loss = policy_loss
    trainer.train()
    token, turn = torch.cat(tokens), torch.cat(turns)
    name = "perf/packed_share"
    shares = [log[name] for log in trainer.state.log_history if name in log]
    # Padded passes of the tiny model cost less than packs.
    assert bool(max(shares)) is packed or model != str(SMOLLM2), "passes went the other way"
    return {
        "token_mean": float(token.mean()),
        "token_max": float(token.max()),
        "turn_max": float(turn.max()),
        "clip_range": trainer._loop.mini_batch.clip_range[0],
        "packed_share": sum(shares) / len(shares),
    }


def main() -> None:
    """Measure the four cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, under a minute")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(SMOLLM2)
        if options.quick:
            model = f"{folder}/model"
            save_random_model("tiny", model, dtype=torch.float32, device="cpu")
        for half in (False, True):
            for packed in (True, False):
                name = f"{'bf16' if half else 'float32'}, {'packed' if packed else 'padded'}"
                results[name] = measure(model, folder, half=half, packed=packed)
                print(name, json.dumps(results[name]), flush=True)
    finish({"threads": torch.get_num_threads(), "results": results})


if __name__ == "__main__":
    main()
