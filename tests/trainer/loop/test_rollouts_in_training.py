"""Every kind of rollout through `trainer.train()`: what reaches the loss, and what is logged."""

import math

import torch

from tests.kit.builders import LIMITS, TEXT, Kept, logs, train
from tests.kit.fakes import char_tokenizer

TOKENIZER = char_tokenizer()


def two_turns(prompts, trainer):
    """Two turns of two tokens with one observation token between; rewards 1 and 2."""
    count = len(prompts)
    return {
        "prompt_ids": [[5, 6]] * count, "completion_ids": [[7, 8, 9, 10, 11]] * count,
        "logprobs": None, "turn_spans": [[(0, 2), (3, 5)]] * count,
        "turn_rewards": [[1.0, 2.0]] * count, "truncated": [False] * count,
        "hint": list(range(count)),
    }  # fmt: skip


def test_a_rollout_func_with_spans_pays_each_turn_at_its_last_token(tmp_path):
    seen = []

    def hinted(completions, hint, **kwargs):
        seen.append(hint)
        return [4.0] * len(completions)

    arguments = {"rollout_func": two_turns, "reward_funcs": hinted}
    trainer = train(tmp_path, Kept, arguments=arguments, kl_coef=0.0)
    _, batch, turns, _, estimates = trainer.kept[0]
    assert turns.turn_index[0].tolist() == [0, 0, -1, 1, 1]
    assert estimates.rewards.tolist() == [[0.0, 1.0, 0.0, 0.0, 6.0]] * 8
    assert batch["loss_mask"][0].tolist() == [True, True, False, True, True]
    assert turns.terminated.all()
    assert seen[0] == list(range(8)), "other keys go to the reward functions"


def test_reward_weights_apply_and_survive_the_constructor(tmp_path):
    def one(completions, **kwargs):
        return [1.0] * len(completions)

    arguments = {**TEXT, "reward_funcs": [one, one]}
    trainer = train(tmp_path, Kept, arguments=arguments, reward_weights=[0.5, -2.0], **LIMITS)
    assert trainer.kept[0][3].tolist() == [-1.5] * 8
    assert trainer.args.reward_weights == [0.5, -2.0]


def test_none_means_that_a_reward_does_not_apply(tmp_path):
    def sometimes(completions, **kwargs):
        return [None if i % 2 else 3.0 for i in range(len(completions))]

    def never(completions, **kwargs):
        return [None] * len(completions)

    trainer = train(tmp_path, Kept, arguments={"reward_funcs": [sometimes, never]})
    _, batch, turns, scores, estimates = trainer.kept[0]
    scored = torch.tensor([True, False] * 4)
    assert scores.tolist() == [3.0, 0.0] * 4
    assert torch.equal(batch["loss_mask"], turns.action_mask & scored.unsqueeze(1))
    assert not estimates.value_mask[~scored].any()
    assert not estimates.advantages[~scored].any()
    trained = estimates.advantages[batch["loss_mask"]]
    assert trained.mean().abs() < 1e-5, "rows without a score do not shift the whitening"
    assert math.isfinite(logs(trainer)["loss"])


def test_a_missing_end_of_turn_costs_its_penalty(tmp_path):
    def rollout(prompts, trainer):
        ids = [[7, 8], [7, TOKENIZER.eos_token_id]] * (len(prompts) // 2)
        return {"prompt_ids": [[5]] * len(prompts), "completion_ids": ids, "logprobs": None}

    def one(completions, **kwargs):
        return [1.0] * len(completions)

    arguments = {"rollout_func": rollout, "reward_funcs": one}
    trainer = train(tmp_path, Kept, arguments=arguments, missing_eos_penalty=0.25)
    assert trainer.kept[0][3].tolist() == [0.75, 1.0] * 4
