"""Episodes that rewrite their context: each context is a row, and an episode counts once."""

import math
import statistics

import pytest
import torch

from tests.kit.contexts import cut_script
from tests.kit.scripted import (
    Float64Groups,
    Float64Trainer,
    assert_same,
    logged,
    plain_logprobs,
    play_script,
    scripted_trainer,
)
from trl_stppo.trainer.batch import full_sequence
from trl_stppo.trainer.loop.forward import ForwardPasses
from trl_stppo.trainer.shuffle import deal, num_episodes
from trl_stppo.trainer.training_loop import TrainingLoop

PLAIN = {"kl_coef": 0.0, "staleness": 0.0, "rollout_func": cut_script}


class KeepingLoop(TrainingLoop):
    def rollout(self, rows):
        self.host.batch = super().rollout(rows)
        return self.host.batch

    def rollout_values(self, batch):
        self.host.values = super().rollout_values(batch)
        return self.host.values

    def report(self, rollout, *args):
        self.host.rollout = rollout
        super().report(rollout, *args)


class Kept(Float64Trainer):
    loop_class = KeepingLoop


class KeptGroups(Float64Groups):
    loop_class = KeepingLoop


def trained(folder, kind=Kept, **options):
    given = {**PLAIN, **options}
    if not kind.has_critic:
        del given["kl_coef"]
    trainer, recorder = scripted_trainer(folder, trainer_class=kind, **given)
    trainer.train()
    return trainer, recorder


def calls_of(trainer):
    """Per episode its turns in order: (row of the batch, tokens of the turn)."""
    for episode in trainer.rollout.episodes:
        rows = {id(c): r for r, (_, c) in enumerate(trainer.rollout.contexts)}
        calls = {}
        for context in episode.contexts:
            for number, (start, end) in zip(context.turns, context.turn_spans, strict=True):
                calls[number] = rows[id(context)], range(start, end)
        yield episode, [calls[number] for number in range(len(calls))]


def loop_gae(trainer, lam, gamma, by_turn):
    """Whitened advantage of each token, by (row, token), in a plain loop over calls."""
    values, final = trainer.values
    expected = {}
    for episode, calls in calls_of(trainer):
        units = []
        for reward, (row, tokens) in zip(episode.turn_rewards, calls, strict=True):
            parts = [tokens] if by_turn else [[t] for t in tokens]
            for part in parts:
                own = reward if part[-1] == tokens[-1] else 0.0
                units.append(([(row, t) for t in part], own, values[row, part[0]].item()))
        after = 0.0 if episode.terminated else final[calls[-1][0]].item()
        advantage = 0.0
        for tokens, reward, value in reversed(units):
            advantage = reward + gamma * after - value + gamma * lam * advantage
            after = value
            expected |= dict.fromkeys(tokens, advantage)
    mean, spread = statistics.mean(expected.values()), statistics.variance(expected.values())
    return {at: (raw - mean) / math.sqrt(spread + 1e-8) for at, raw in expected.items()}


@pytest.mark.parametrize("level", ["token", "turn"])
def test_gae_goes_on_where_a_context_was_rewritten(level, tmp_path):
    ends = lambda prompts, trainer=None: {  # noqa: E731
        **(output := cut_script(prompts)),
        "terminated": [n % 2 == 0 for n in output["episode_of"]],
    }
    options = {"lam": 0.7, "gamma": 0.9, "advantage_level": level, "rollout_func": ends}
    trainer, _ = trained(tmp_path, bootstrap_truncated=True, **options)
    counts = [len(episode.contexts) for episode in trainer.rollout.episodes]
    assert min(counts) == 1 < max(counts), "the case should be interesting"
    expected = loop_gae(trainer, 0.7, 0.9, level == "turn")
    batch = trainer.batch
    found = {tuple(at): batch["advantages"][*at].item() for at in batch["loss_mask"].nonzero().tolist()}
    assert found.keys() == expected.keys(), "each sampled token trains once"
    for at, value in expected.items():
        assert found[at] == pytest.approx(value, rel=1e-9, abs=1e-12), at


class ByToken(KeepingLoop):
    """A critic that knows only the token behind it, so that contexts do not matter."""

    def rollout_values(self, batch):
        values = batch["completion_ids"].double() / 50
        return values, values[:, 0]


class KeptByToken(Float64Trainer):
    loop_class = ByToken


@pytest.mark.long
@pytest.mark.parametrize("options", [
    {"whiten_rewards": True, "kl_coef": 0.0},
    {"advantage_level": "turn", "lam": 0.6},
])  # fmt: skip
def test_the_same_turns_have_the_same_advantages_however_they_are_cut(options, tmp_path):
    def advantages(name, play):
        trainer, _ = trained(tmp_path / name, KeptByToken, **options, rollout_func=play)
        batch = trainer.batch
        return [
            [batch["advantages"][row, t].item() for row, tokens in calls for t in tokens]
            for _, calls in calls_of(trainer)
        ]

    whole = advantages("whole", play_script)
    for name, play in (
        ("cut", cut_script),
        ("all", lambda p, t=None: cut_script(p, all_turns=True)),
    ):
        for one, other in zip(advantages(name, play), whole, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("loss_type", "wins"), [
    ("grpo", False), ("bnpo", False), ("dr_grpo", False), ("grpo", True),
])  # fmt: skip
def test_the_gradient_is_that_of_a_plain_sum_in_which_an_episode_weighs_as_one(loss_type, wins, tmp_path):
    options = {"loss_type": loss_type, "max_completion_length": 40, "variant": "ppo"}
    if wins:
        options |= {"variant": "s-ppo", "stabilizers": ["winners"], "clip_bias_estimator": None}
    trainer, recorder = scripted_trainer(tmp_path, trainer_class=Kept, **{**PLAIN, **options})
    policy = trainer.model
    captured = {}
    original = trainer._loop.rollout

    def rollout(rows):
        batch = original(rows)
        ids, mask, length = full_sequence(batch)
        logprobs, _ = plain_logprobs(policy, ids, mask, length)
        total, episodes = 0.0, trainer.rollout.episodes
        tokens, sums = [0] * len(episodes), [0.0] * len(episodes)
        for row, (n, _) in enumerate(trainer.rollout.contexts):
            mask = batch["loss_mask"][row]
            tokens[n] += int(mask.sum())
            sums[n] += batch["advantages"][row][mask].sum().item()
        for row, (n, _) in enumerate(trainer.rollout.contexts):
            terms = (logprobs[row] * batch["advantages"][row])[batch["loss_mask"][row]].sum()
            divisor = {
                "grpo": len(episodes) * tokens[n],
                "bnpo": sum(tokens),
                "dr_grpo": len(episodes) * 40,
            }[loss_type]
            total = total - (sums[n] > 0 or not wins) * terms / divisor
        named = dict(policy.named_parameters())
        captured.update(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))
        return batch

    trainer._loop.rollout = rollout
    trainer.train()
    grads = {name: captured[name] for name in recorder.grads[0]}
    assert_same(recorder.grads[0], grads, rtol=1e-7)


@pytest.mark.parametrize("options", [
    {"variant": "st-ppo", "stabilizers": ["share", "winners"], "beta": 0.1, "entropy_coef": 0.01},
    {"variant": "s-ppo", "stabilizers": ["triggered"], "max_grad_norm": 0.5, "loss_type": "grpo"},
])  # fmt: skip
def test_no_split_of_the_contexts_changes_a_step(options, tmp_path, monkeypatch):
    """Pieces of 2, 3 or 8 rows, in 1 or 4 micro-batches, and all in one."""
    sizes = [(8, 1), (2, 4), (8, 1)]
    runs = []
    for number, (size, micro_batches) in enumerate(sizes):
        if number == 2:
            monkeypatch.setattr(ForwardPasses, "pieces", lambda self, inputs, *_, **__: [inputs])
        trainer, recorder = trained(
            tmp_path / str(number), **options, num_ppo_epochs=2, max_steps=2, learning_rate=0.5,
            per_device_train_batch_size=size, gradient_accumulation_steps=micro_batches,
            generation_batch_size=8,
        )  # fmt: skip
        assert max(logged(trainer, "policy/ratio_max")) > 1.001
        runs.append(recorder.after[-1])
    assert_same(runs[1], runs[0], rtol=1e-8)
    assert_same(runs[2], runs[0], rtol=1e-8)


def test_episodes_are_dealt_in_equal_numbers_with_all_of_their_contexts(tmp_path):
    trainer, _ = trained(tmp_path)
    batch = trainer.batch
    assert len(batch["loss_mask"]) > 8
    dealt = deal([batch], 4)
    numbers = [set(part["episode"].tolist()) for part in dealt]
    assert [len(each) for each in numbers] == [2] * 4
    assert sorted(n for each in numbers for n in each) == list(range(8))
    assert sum(len(part["episode"]) for part in dealt) == len(batch["episode"])
    assert num_episodes(dealt) == 8


def test_groups_compare_episodes(tmp_path):
    trainer, _ = trained(tmp_path, KeptGroups, variant="st-grpo", num_generations=4)
    earned = torch.tensor([sum(e.turn_rewards) for e in trainer.rollout.episodes], dtype=torch.float64)
    groups = earned.view(-1, 4)
    expected = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    batch = trainer.batch
    for row, (n, _) in enumerate(trainer.rollout.contexts):
        values = batch["advantages"][row][batch["loss_mask"][row]]
        assert values.tolist() == pytest.approx([expected[n].item()] * len(values), rel=1e-3)
