"""How episodes are dealt into mini-batches, epoch by epoch, and who trains with which rate."""

from collections import Counter

import pytest
import torch

from tests.kit.scripted import logged, play_script, scripted_trainer, train
from trl_stppo import STPPOTrainer

ROWS, EPOCHS, MINI_BATCHES = 16, 2, 4
NUMBER = {tuple(play_script([str(n)])["completion_ids"][0]): n for n in range(ROWS)}


class Dealt(STPPOTrainer):
    """Notes the episodes of every micro-batch, and the counts it was weighted with."""

    def _compute_loss(self, model, inputs):
        ids, mask = inputs["completion_ids"], inputs["completion_mask"].bool()
        rows = [NUMBER[tuple(row[keep].tolist())] for row, keep in zip(ids, mask, strict=True)]
        self.__dict__.setdefault("dealt", []).append(rows)
        own = self._loop.mini_batch
        totals = [own.episodes, own.turns, own.policy_tokens, own.value_tokens]
        self.__dict__.setdefault("totals", []).append(torch.stack(totals).tolist())
        self.__dict__.setdefault("widths", []).append(own.clip_range)
        return super()._compute_loss(model, inputs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two rollouts of 16 episodes, 2 epochs of 4 mini-batches of 2 micro-batches of 2."""
    trainer, _ = scripted_trainer(
        tmp_path_factory.mktemp("run"), trainer_class=Dealt, rows=ROWS,
        per_device_train_batch_size=2, gradient_accumulation_steps=8, num_mini_batches=MINI_BATCHES,
        num_ppo_epochs=EPOCHS, total_episodes=2 * ROWS, max_steps=-1, variant="st-ppo", cliprange=None,
    )  # fmt: skip
    trainer.train()
    return trainer


def epochs(trainer) -> list[list[list[int]]]:
    """Mini-batches of every epoch, as lists of episode numbers."""
    pairs = zip(trainer.dealt[::2], trainer.dealt[1::2], strict=True)
    batches = [[*one, *other] for one, other in pairs]
    return [batches[i : i + MINI_BATCHES] for i in range(0, len(batches), MINI_BATCHES)]


@pytest.mark.long
def test_every_epoch_takes_every_episode_once(finished):
    assert finished.state.global_step == 2 * EPOCHS * MINI_BATCHES
    assert len(epochs(finished)) == 2 * EPOCHS
    for epoch in epochs(finished):
        assert Counter(n for batch in epoch for n in batch) == Counter(range(ROWS))


def test_mini_batches_are_drawn_anew_in_every_epoch(finished):
    drawn = [frozenset(frozenset(batch) for batch in epoch) for epoch in epochs(finished)]
    assert len(set(drawn)) == len(drawn)


def test_every_micro_batch_is_weighted_with_its_mini_batchs_counts(finished):
    """Episodes, turns, policy tokens and value tokens: of both micro-batches, and of no others."""
    spans = [play_script([str(n)])["turn_spans"][0] for n in range(ROWS)]
    lengths = [sum(end - start for start, end in each) for each in spans]
    for i, totals in enumerate(finished.totals):
        first = i - i % 2
        episodes = [n for rows in finished.dealt[first : first + 2] for n in rows]
        turns, tokens = (sum(each[n] for n in episodes) for each in (list(map(len, spans)), lengths))
        assert totals == [4, turns, tokens, tokens]


def test_an_unset_clip_range_is_narrowed_by_the_mini_batchs_tokens_per_turn(finished):
    for (_, turns, tokens, _), widths in zip(finished.totals, finished.widths, strict=True):
        assert widths == (pytest.approx(0.2 * turns / tokens),) * 2
    assert len(set(finished.widths)) > 1
    assert min(finished.widths)[0] < 0.1


@pytest.mark.parametrize(
    ("level", "given", "width"),
    [("turn", {"cliprange": 0.3}, 0.3), ("token", {"cliprange": None}, 0.2)],
)
def test_a_set_clip_range_and_that_of_tokens_stay(tmp_path, level, given, width):
    trainer, _ = train(
        tmp_path,
        trainer_class=Dealt,
        rows=ROWS,
        variant=None,
        importance_sampling_level=level,
        **given,
    )
    assert set(trainer.widths) == {(width, width)}


def test_the_unset_clip_range_of_an_episodes_ratio_is_narrowed_by_its_tokens(tmp_path):
    trainer, _ = train(
        tmp_path,
        trainer_class=Dealt,
        rows=ROWS,
        variant=None,
        importance_sampling_level="sequence",
        cliprange=None,
    )
    for (episodes, _, tokens, _), widths in zip(trainer.totals, trainer.widths, strict=True):
        assert widths[0] == pytest.approx(0.2 * episodes / tokens)


def test_old_logprobs_stay_those_of_the_rollout_in_every_epoch(tmp_path):
    """With every step the policy drifts further from them; the next rollout starts at zero."""
    trainer, _ = train(tmp_path, staleness=0.0, num_ppo_epochs=3, max_steps=6, learning_rate=0.05)
    drift = logged(trainer, "policy/approx_kl")
    assert drift[0] == pytest.approx(0.0, abs=1e-12)
    assert 0 < drift[1] < drift[2]
    assert drift[3] == pytest.approx(0.0, abs=1e-12)
    assert drift[4] > 0
