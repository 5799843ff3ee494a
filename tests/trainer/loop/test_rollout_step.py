"""The rollout step: what it calls, what it hands on, and that it leaves nothing behind."""

import copy
import math

import pytest
import torch

from tests.kit.builders import LIMITS, Kept, build, logs, prompts, share_of_a, train
from tests.kit.fakes import CountEnv
from trl_stppo import PPOTrainer
from trl_stppo.rollout.episode import Episode
from trl_stppo.trainer import batch as batches

ONE = {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "max_steps": 1, "kl_coef": 0.0}


def test_a_loss_that_leaves_the_critic_out_is_refused_before_the_first_step(tmp_path):
    class Own(PPOTrainer):
        def _compute_loss(self, model, inputs):
            return self._loop.policy_loss(model, inputs)

    with pytest.raises(TypeError, match="_compute_loss"):
        train(tmp_path, Own, **ONE)

    class Wraps(PPOTrainer):
        def _compute_loss(self, model, inputs):
            return 2 * super()._compute_loss(model, inputs)

    train(tmp_path / "wraps", Wraps, **ONE)


def test_a_subclass_scores_by_calculate_rewards_and_returns_all_processes_rows(tmp_path):
    asked = []

    class Own(Kept):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            asked.append((inputs, prompts, completions, completion_ids_list))
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return rewards + 5.0

    trainer = train(tmp_path, Own, **ONE)
    ((inputs, asked_of, completions, ids),) = asked
    assert [row["prompt"] for row in inputs] == asked_of
    assert [row.keys() for row in inputs] == [{"prompt"}] * 4
    assert ids == [episode.ids for episode in trainer.episodes]
    assert completions == [episode.messages for episode in trainer.episodes]
    scores = trainer.kept[0][3]
    torch.testing.assert_close(scores, torch.tensor(share_of_a(completions)) + 5.0)


def test_a_turn_sampler_of_ones_own_is_asked_for_every_turn(tmp_path):
    rows = []

    class Own(Kept):
        def _generate_single_turn(self, prompt_ids, *args):
            rows.append(copy.deepcopy(prompt_ids))
            return [[7, self.eos_token_ids[0]] for _ in prompt_ids], None

    trainer = train(tmp_path, Own, **ONE)
    assert rows == [[episode.prompt_ids for episode in trainer.episodes]]
    assert all(e.ids == [7, trainer.eos_token_ids[0]] for e in trainer.episodes)
    assert "own generation" not in str(trainer._player.sampler.why_not_cached())
    assert trainer._player.sampler.why_not_cached() == "Own generates by itself."


def test_plain_prompts_are_episodes_of_one_turn_each_from_its_own_seed(tmp_path):
    """So an answer does not depend on its neighbours, as one that `generate` draws does."""
    ids = {}
    for size in (4, 8):
        data = prompts(8)
        options = {**ONE, "per_device_train_batch_size": size, "shuffle_dataset": False}
        trainer = build(tmp_path, Kept, arguments={"train_dataset": data}, **options)
        trainer.train()
        assert [episode.turn_spans for episode in trainer.episodes] == [
            [(0, len(episode.ids))] for episode in trainer.episodes
        ]
        ids[size] = [episode.ids for episode in trainer.rollouts[0].episodes]
    assert ids[4] == ids[8][:4]
    assert len({tuple(row) for row in ids[8]}) == 8
    assert not any(name.startswith("stop_reason/") for name in logs(trainer))


def episode(row, prompt, ids, mask, logprobs=None):
    return Episode(
        row, {}, "", prompt_ids=prompt, ids=ids, action_mask=[bool(m) for m in mask],
        logprobs=[0.0] * len(ids) if logprobs is None else logprobs,
    )  # fmt: skip


def test_collate_by_hand():
    played = [
        episode(0, [1, 2], [3, 4, 5], [1, 0, 1], [-1.0, 0.0, None]),
        episode(1, [6], [7], [1]),
    ]
    batch = batches.collate(
        played, pad_token_id=9, multiple_of=None, device=torch.device("cpu"), has_logprobs=True,
        hidden=[False, False],
    )  # fmt: skip
    assert batch["prompt_ids"].tolist() == [[1, 2], [9, 6]]
    assert batch["prompt_mask"].tolist() == [[1, 1], [0, 1]]
    assert batch["completion_ids"].tolist() == [[3, 4, 5], [7, 9, 9]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (batch["completion_mask"] * batch["tool_mask"]).tolist() == [[1, 0, 1], [1, 0, 0]]
    said = batch["sampling_per_token_logps"].tolist()
    assert said[0][:2] == [-1.0, 0.0]
    assert math.isnan(said[0][2])
    assert said[1] == [0.0] * 3


def test_hidden_episodes_have_had_turns(tmp_path):
    """`mask_truncated_completions` keeps them from training, not out of the figures."""
    options = {**ONE, **LIMITS, "max_turns": 2, "mask_truncated_completions": True}
    trainer = train(tmp_path, Kept, arguments={"environment_factory": lambda: CountEnv(turns=3)}, **options)
    assert (trainer.kept[0][1]["completion_mask"].sum(dim=1) == 0).any()
    assert logs(trainer)["turns/mean"] == sum(e.num_turns for e in trainer.episodes) / 4
    tokens = sum(sum(e.action_mask) for e in trainer.episodes)
    turns = sum(e.num_turns for e in trainer.episodes)
    assert logs(trainer)["turns/tokens_mean"] == pytest.approx(tokens / turns)
