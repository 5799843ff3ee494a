"""What is cut off and grouped to save padding changes neither ratios nor options."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from tests.builders import build
from tests.fakes import char_tokenizer
from trl_stppo import PPOConfig, PPOTrainer
from trl_stppo.trainer.loop.batch import group_by_length, without_padding

RAGGED = ["ab", "a much longer prompt than the others", "abc", "abcdefgh"]


def length_reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


def absolute_positions(folder, **options):
    """A model with learned absolute positions, on prompts of very different lengths."""
    tokenizer = char_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=256,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, initializer_range=0.5,
    )  # fmt: skip
    args = PPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=4,
        num_mini_batches=1, num_ppo_epochs=2, total_episodes=8, max_completion_length=12,
        learning_rate=0.0, critic_learning_rate=0.0, use_cpu=True, bf16=False, report_to="none",
        logging_steps=1, save_strategy="no", kl_coef=0.01, disable_tqdm=True, **options,
    )  # fmt: skip
    return PPOTrainer(
        model=GPT2LMHeadModel(config),
        args=args,
        reward_funcs=length_reward,
        train_dataset=Dataset.from_dict({"prompt": RAGGED * 2}),
        processing_class=tokenizer,
    )


def test_an_unchanged_policy_has_ratio_one_where_positions_are_absolute(tmp_path):
    trainer = absolute_positions(tmp_path)
    trainer.train()
    for entry in trainer.state.log_history:
        if "policy/ratio_max" in entry:
            assert entry["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
            assert entry["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_of_truncated_episodes_only_do_no_harm(tmp_path, size):
    trainer = build(
        tmp_path,
        mask_truncated_completions=True,
        max_completion_length=40,
        gradient_accumulation_steps=8 // size,
        num_mini_batches=1,
        per_device_train_batch_size=size,
        arguments={"reward_funcs": length_reward},
    )
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    logged = [entry for entry in trainer.state.log_history if "policy/clip_fraction" in entry]
    assert len(logged) == 2  # in each step some of the eight episodes count
    assert all(0.5 <= entry["completions/clipped_ratio"] < 1.0 for entry in logged)
    assert all(entry["policy/clip_fraction"] == 0.0 for entry in logged)


def batch(lengths, width):
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    return {
        "prompt_ids": torch.zeros(len(lengths), 5),
        "prompt_mask": torch.ones(len(lengths), 5),
        "completion_ids": mask * 7,
        "completion_mask": mask,
        "advantages": mask.float(),
        "num_items_in_batch": torch.tensor(3),
    }


@pytest.mark.parametrize(
    ("lengths", "width", "kept"), [([3, 5], 10, 5), ([0, 0], 10, 1), ([10], 10, 10), ([2, 3], 5, 3)]
)
def test_only_columns_that_all_episodes_lack_are_cut(lengths, width, kept):
    cut = without_padding(batch(lengths, width))  # prompts have 5 columns and keep them
    assert cut["completion_ids"].shape == (len(lengths), kept)
    assert cut["advantages"].shape == (len(lengths), kept)
    assert cut["prompt_ids"].shape == cut["prompt_mask"].shape == (len(lengths), 5)
    assert cut["completion_mask"].sum() == sum(lengths)


def test_grouping_by_length_loses_no_episode():
    groups = group_by_length([batch([4, 1], 6), batch([3, 2], 6)])
    assert [g["completion_mask"].sum(1).tolist() for g in groups] == [[1, 2], [3, 4]]
    assert groups[0]["num_items_in_batch"] == 3
