"""Lemma 4.1 and its consequences, on a tiny softmax policy in float64.

The policy is a table: pi(next | last) = softmax(W[last]), so that the gradient of a log-probability
is known in closed form (the chosen letter's unit vector minus the probabilities, in row `last`).
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from tests.kit import references
from trl_stppo import core

VOCABULARY, LENGTH, LOW, HIGH = 4, 12, 0.05, 0.08
SPANS = [
    # The second and third turn are adjacent.
    [(1, 4), (6, 8), (8, 11)],
    # The turn reaches the last position.
    [(2, 12)],
    [],
    [(1, 2), (3, 4), (5, 6)],
    [(1, 3), (4, 9)],
]


@pytest.fixture
def world():
    """A stale policy, the episodes it sampled, and advantages of both signs inside each turn."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    old_table = torch.randn(VOCABULARY, VOCABULARY, generator=generator).double()
    table = old_table + 0.4 * torch.randn(VOCABULARY, VOCABULARY, generator=generator).double()
    letters = [[rng.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in SPANS]
    advantages = torch.randn(len(SPANS), LENGTH, generator=generator).double()
    index = core.turn_index_from_spans(SPANS, LENGTH)
    return SimpleNamespace(
        table=table, old_table=old_table, letters=letters, advantages=advantages, index=index,
        mask=index >= 0,
    )  # fmt: skip


def logprobs_of(table, letters):
    """[B, T] log pi(letter | letter before); position 0 has none and is outside every turn."""
    rows = torch.tensor(letters)
    following = table.log_softmax(dim=1)[rows[:, :-1]].gather(2, rows[:, 1:].unsqueeze(2))
    return torch.nn.functional.pad(following.squeeze(2), (1, 0), value=float("nan"))


def surrogate_sums(world, table, level="turn", rows=slice(None), garbage=None):
    """J_kept and J_clip: this slice of episodes' share of the mean over all of them.

    If given, `garbage` takes the place of everything at observation tokens.
    """
    mask = world.mask[rows]
    inputs = [
        logprobs_of(table, world.letters[rows]),
        logprobs_of(world.old_table, world.letters[rows]),
        world.advantages[rows],
    ]
    if garbage is not None:
        inputs = [x.masked_fill(~mask, garbage) for x in inputs]
    log_ratio = core.log_importance_ratio(inputs[0], inputs[1], world.index[rows], level)
    out = core.clipped_surrogate(log_ratio, inputs[2], mask, LOW, HIGH)
    weights = core.aggregation_weights(
        mask, "grpo", num_episodes=len(SPANS), num_tokens=world.mask.sum(), dtype=torch.float64
    )
    return (out.kept * weights).sum(), (out.clipped * weights).sum(), out


def gradients(world, level="turn", rows=slice(None), table=None, garbage=None):
    """g and C by autograd."""
    table = (world.table if table is None else table).clone().requires_grad_()
    kept, clipped, out = surrogate_sums(world, table, level, rows, garbage)
    g = torch.autograd.grad(kept, table, retain_graph=True)[0]
    return g, torch.autograd.grad(clipped, table)[0], out


def log_softmax(row):
    top = max(row)
    norm = top + math.log(sum(math.exp(x - top) for x in row))
    return [x - norm for x in row]


def turn_ratio(world, table, b, span):
    """Geometric mean of the turn's token ratios."""
    letters, old = world.letters[b], world.old_table.tolist()
    total = sum(
        log_softmax(table[letters[t - 1]])[letters[t]] - log_softmax(old[letters[t - 1]])[letters[t]]
        for t in range(*span)
    )
    return math.exp(total / (span[1] - span[0]))


def lemma_4_1(world, table, count_clipped):
    """mean_b 1/|y_b| sum_k w_k (A^k / |y^k|) grad log pi(y^k), with A^k over kept or clipped."""
    gradient = [[0.0] * VOCABULARY for _ in range(VOCABULARY)]
    for b, turns in enumerate(SPANS):
        tokens = sum(end - start for start, end in turns)
        for start, end in turns:
            w = turn_ratio(world, table, b, (start, end))
            credit = sum(
                a
                for a in world.advantages[b, start:end].tolist()
                if references.is_clipped(w, a, LOW, HIGH) is count_clipped
            )
            factor = w * credit / (end - start) / tokens / len(SPANS)
            for t in range(start, end):
                last, letter = world.letters[b][t - 1], world.letters[b][t]
                for v, log_p in enumerate(log_softmax(table[last])):
                    gradient[last][v] += factor * ((v == letter) - math.exp(log_p))
    return gradient


def loop_objective(world, table, which):
    """The aggregated objective: "clipped" = the usual min/clip one, "unclipped" = w A."""
    per_token = [[0.0] * LENGTH for _ in SPANS]
    for b, turns in enumerate(SPANS):
        for span in turns:
            w = turn_ratio(world, table, b, span)
            for t in range(*span):
                a = world.advantages[b, t].item()
                usual = references.objective(w, a, LOW, HIGH)
                per_token[b][t] = usual if which == "clipped" else w * a
    mask = world.mask.tolist()
    return references.aggregate(per_token, mask, "grpo", len(SPANS), None)


def central_differences(world, which, step=1e-5):
    gradient = []
    for i in range(VOCABULARY):
        gradient.append([])
        for j in range(VOCABULARY):
            sides = []
            for sign in (1, -1):
                table = world.table.tolist()
                table[i][j] += sign * step
                sides.append(loop_objective(world, table, which))
            gradient[i].append((sides[0] - sides[1]) / (2 * step))
    return gradient


def test_lemma_4_1_gradient_and_bias_by_autograd(world, close):
    g, bias, out = gradients(world)
    assert out.is_clipped.any()
    assert (world.mask & ~out.is_clipped).any()
    close(g, lemma_4_1(world, world.table.tolist(), count_clipped=False))
    close(bias, lemma_4_1(world, world.table.tolist(), count_clipped=True))


def test_lemma_4_1_by_central_differences(world, close):
    g, bias, _ = gradients(world)
    # g is the gradient of the usual min/clip objective, g + C that of the unclipped one
    close(g, central_differences(world, "clipped"), rtol=0, atol=1e-8)
    close(g + bias, central_differences(world, "unclipped"), rtol=0, atol=1e-8)
    assert bias.norm() > 1e-3


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_g_plus_bias_is_the_gradient_of_the_unclipped_objective(world, close, level):
    g, bias, out = gradients(world, level)
    table = world.table.clone().requires_grad_()
    log_ratio = core.log_importance_ratio(
        logprobs_of(table, world.letters), logprobs_of(world.old_table, world.letters),
        world.index, level,
    )  # fmt: skip
    lengths = world.mask.sum(1, keepdim=True).clamp(min=1)
    unclipped = (log_ratio.exp() * world.advantages).masked_fill(~world.mask, 0.0) / lengths
    (expected,) = torch.autograd.grad(unclipped.sum() / len(SPANS), table)
    assert out.is_clipped.any()
    close(g + bias, expected)


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_no_bias_at_the_old_policy_and_every_mode_leaves_the_step_alone(world, close, level):
    g, bias, out = gradients(world, level, table=world.old_table)
    assert not out.is_clipped.any()
    assert torch.equal(bias, torch.zeros_like(bias))
    assert g.norm() > 1e-3
    for mode in core.NORMALIZATION_MODES:
        assert core.normalization_scale(g.norm(), bias.norm(), mode).item() == 1.0
    # one-token and whole-episode ratios agree there, but the credit is shared differently
    token = gradients(world, "token", table=world.old_table)[0]
    assert (level == "token") == torch.allclose(g, token)


def test_mixed_signs_inside_one_clipped_turn_by_hand(close):
    # one turn of three tokens, w = 2 at each: A = 3 is clipped, -1 and 0.5 are kept and clipped
    log_ratio_per_token = torch.tensor([[1.0, 0.2, 0.3]], dtype=torch.float64) * math.log(2) / 0.5
    logprobs = log_ratio_per_token.requires_grad_()
    index = torch.zeros(1, 3, dtype=torch.int64)
    # the mean of (1, 0.2, 0.3) is 0.5, so the turn's log ratio is ln 2
    log_ratio = core.log_importance_ratio(logprobs, torch.zeros(1, 3).double(), index, "turn")
    close(log_ratio.detach().exp(), [[2.0, 2.0, 2.0]])
    advantages = torch.tensor([[3.0, -1.0, 0.5]], dtype=torch.float64)
    out = core.clipped_surrogate(log_ratio, advantages, index == 0, 0.2, 0.2)
    assert out.is_clipped.tolist() == [[True, False, True]]
    g = torch.autograd.grad(out.kept.sum(), logprobs, retain_graph=True)[0]
    bias = torch.autograd.grad(out.clipped.sum(), logprobs)[0]
    # w A^k / |y^k| at every token of the turn: kept 2 * -1 / 3, clipped 2 * 3.5 / 3
    close(g, [[-2 / 3] * 3])
    close(bias, [[7 / 3] * 3])


def test_the_world_has_such_turns(world):
    out = gradients(world)[2]
    mixed = [
        (b, span)
        for b, turns in enumerate(SPANS)
        for span in turns
        if 0 < out.is_clipped[b, slice(*span)].sum() < span[1] - span[0]
    ]
    assert mixed


def test_adjacent_turns_without_observation_stay_two_turns(world):
    # joined, the two turns of the first episode share one ratio, and the gradient is another
    separate = gradients(world)[0]
    world.index = torch.tensor(references.turns_of_mask(world.mask.tolist()))
    assert core.num_turns(world.index).tolist() == [2, 1, 0, 3, 2]
    joined = gradients(world)[0]
    assert not torch.allclose(separate, joined)


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_splitting_the_mini_batch_changes_neither_g_nor_bias_nor_scale(world, close, size, level):
    g, bias, _ = gradients(world, level)
    parts = [gradients(world, level, rows=slice(start, start + size)) for start in range(0, len(SPANS), size)]
    split_g, split_bias = sum(p[0] for p in parts), sum(p[1] for p in parts)
    close(split_g, g)
    close(split_bias, bias)
    for mode in core.NORMALIZATION_MODES:
        whole = core.normalization_scale(g.norm(), bias.norm(), mode)
        close(core.normalization_scale(split_g.norm(), split_bias.norm(), mode), whole)


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
@pytest.mark.parametrize("garbage", [float("nan"), 1e3])
def test_observation_tokens_are_inert_from_end_to_end(world, level, garbage):
    clean = gradients(world, level)
    poisoned = gradients(world, level, garbage=garbage)
    for a, b in zip(clean[:2], poisoned[:2], strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(b).all()
