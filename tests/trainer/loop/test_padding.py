"""What is cut off and grouped to save padding changes neither ratios nor options."""

import pytest
import torch

from tests.kit.builders import build
from trl_stppo.trainer.shuffle import group_by_length, without_padding


def length_reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_of_truncated_episodes_only_do_no_harm(tmp_path, size):
    trainer = build(
        tmp_path, mask_truncated_completions=True, max_completion_length=40,
        gradient_accumulation_steps=8 // size, num_mini_batches=1, per_device_train_batch_size=size,
        arguments={"reward_funcs": length_reward},
    )  # fmt: skip
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    logged = [entry for entry in trainer.state.log_history if "policy/clip_fraction" in entry]
    assert len(logged) == 2
    assert all(0.5 <= entry["completions/clipped_ratio"] < 1.0 for entry in logged)
    assert all(entry["policy/clip_fraction"] == 0.0 for entry in logged)


def batch(lengths, width):
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    return {
        "prompt_ids": torch.zeros(len(lengths), 5), "prompt_mask": torch.ones(len(lengths), 5),
        "completion_ids": mask * 7, "completion_mask": mask, "advantages": mask.float(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "width", "kept"), [([3, 5], 10, 5), ([0, 0], 10, 1), ([10], 10, 10), ([2, 3], 5, 3)]
)
def test_only_columns_that_all_episodes_lack_are_cut(lengths, width, kept):
    cut = without_padding(batch(lengths, width))
    assert cut["completion_ids"].shape == (len(lengths), kept)
    assert cut["advantages"].shape == (len(lengths), kept)
    assert cut["prompt_ids"].shape == cut["prompt_mask"].shape == (len(lengths), 5)
    assert cut["completion_mask"].sum() == sum(lengths)


def test_grouping_by_length_loses_no_episode():
    groups = group_by_length([batch([4, 1], 6), batch([3, 2], 6)])
    assert [g["completion_mask"].sum(1).tolist() for g in groups] == [[1, 2], [3, 4]]
