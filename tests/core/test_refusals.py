"""What a function of the core refuses: a ValueError names the field."""

import math

import pytest
import torch

from trl_stppo import core
from trl_stppo.core.layout import group_rows

NAN = math.nan
X, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
INDEX = LONG = torch.zeros(2, 3, dtype=torch.int64)
TWO_TURNS, SCORES = torch.tensor([[0, 0, 0], [0, -1, 1]]), torch.zeros(2)
NARROW, COLUMN = X[:, :2], X[:, :1]
COUNTS = {"num_episodes": 2, "num_tokens": 6}


def rewards(index=INDEX, scores=SCORES, **given):
    return core.token_rewards(index, scores=scores, **given)


def surrogate(log_ratio=X, advantages=X, mask=MASK, low=0.2, high=0.2, **given):
    return core.clipped_surrogate(log_ratio, advantages, mask, low, high, **given)


def ratio(logprobs=X, old=X, index=INDEX, level="turn", **given):
    return core.log_importance_ratio(logprobs, old, index, level, **given)


def corrected(old=X, sampling=X, index=INDEX, level="turn", **given):
    return core.sampler_correction(old, sampling, index, level, truncate=True, **given)


def normed(rewards=X, index=INDEX, counts=MASK, gamma=1.0):
    return core.return_batch_norm(rewards, index, counts, gamma)


def reduced(x=X, index=INDEX, num_turns=1, op="sum"):
    return core.reduce_turns(x, index, num_turns=num_turns, op=op)


def estimated(level, rewards=X, values=X, index=None, gamma=1.0, lam=1.0, **given):
    function, own = {"token": (core.token_gae, MASK), "turn": (core.turn_gae, INDEX)}[level]
    return function(rewards, values, own if index is None else index, gamma, lam, **given)


REFUSED = [
    # turns
    *(
        ("turn_index", lambda f=f, bad=bad: f(bad))
        for f in (core.num_turns, core.turn_starts, core.turn_ends)
        for bad in (INDEX.int(), INDEX[0])
    ),
    ("op", lambda: reduced(op="max")),
    ("num_turns", lambda: reduced(num_turns=-1)),
    ("num_turns", lambda: reduced(index=TWO_TURNS)),
    *(("x", lambda bad=bad: reduced(bad)) for bad in (NARROW, LONG)),
    *(("x", lambda bad=bad: core.broadcast_turns(bad, INDEX)) for bad in (torch.zeros(1, 4), LONG)),
    ("x", lambda: core.broadcast_turns(torch.zeros(2, 1), TWO_TURNS)),
    # rewards and advantages
    ("turn_index", lambda: rewards(INDEX.int())),
    *(("scores", lambda bad=bad: rewards(scores=bad)) for bad in (torch.zeros(3), SCORES.long())),
    *(("kl", lambda bad=bad: rewards(kl=bad, kl_coef=0.1)) for bad in (COLUMN, LONG)),
    ("turn_rewards", lambda: rewards(turn_rewards=torch.zeros(3, 1))),
    *(
        (name, lambda name=name, level=level, bad=bad: estimated(level, **{name: bad}))
        for level in ("token", "turn")
        for name, bad in (
            *(("gamma", 1.5), ("lam", -0.1), ("values", NARROW), ("rewards", LONG)),
            *(("bootstrap_values", torch.zeros(3)), ("bootstrap_values", torch.zeros(2).long())),
        )
    ),
    ("action_mask", lambda: estimated("token", index=X)),
    ("turn_index", lambda: estimated("turn", index=X)),
    *(("x", lambda bad=bad: core.whiten(bad, MASK)) for bad in (NARROW, LONG)),
    ("mask", lambda: core.whiten(X, X)),
    ("scale", lambda: core.group_advantages(X, MASK, "x")),
    *(
        (name, lambda f=f, given=given: f(*given))
        for f in (core.group_advantages, core.leave_one_out_advantages)
        for name, given in (
            *(("scores", (LONG, MASK)), ("counts", (X, LONG)), ("scores", (X, MASK[:1]))),
        )
    ),
    *(("gamma", lambda bad=bad: normed(gamma=bad)) for bad in (-0.1, 1.1)),
    *(("rewards", lambda bad=bad: normed(bad)) for bad in (LONG, X[:1])),
    *(("counts", lambda bad=bad: normed(counts=bad)) for bad in (X, MASK[:1])),
    ("turn_index", lambda: normed(index=INDEX.int())),
    *(("advantages", lambda bad=bad: core.winner_weights(bad, MASK)) for bad in (NARROW, LONG)),
    ("loss_mask", lambda: core.winner_weights(X, X)),
    # ratios and the surrogate
    ("level", lambda: ratio(level="word")),
    ("old_logprobs", lambda: ratio(old=NARROW)),
    ("logprobs", lambda: ratio(LONG)),
    ("turn_index", lambda: ratio(index=X)),
    *(("loss_mask", lambda bad=bad: ratio(loss_mask=bad)) for bad in (LONG, MASK[:, :2])),
    ("cliprange_low", lambda: surrogate(low=-0.1)),
    ("cliprange_high", lambda: surrogate(high=-0.2)),
    ("delta", lambda: surrogate(high=0.5, delta=1.5)),
    ("loss_mask", lambda: surrogate(mask=X)),
    ("advantages", lambda: surrogate(advantages=COLUMN)),
    ("log_ratio", lambda: surrogate(LONG)),
    *(("weights", lambda bad=bad: surrogate(weights=bad)) for bad in (torch.ones(2), MASK)),
    *(
        ("clip_min", lambda low=low, high=high: corrected(clip_min=low, clip_max=high))
        for low, high in ((2.0, 1.0), (NAN, None), (None, NAN), (None, -1.0))
    ),
    ("level", lambda: corrected(level="word")),
    *(("sampling_logprobs", lambda bad=bad: corrected(sampling=bad)) for bad in (LONG, torch.zeros(2, 4))),
    *(("turn_index", lambda bad=bad: corrected(index=bad)) for bad in (X, torch.zeros(2, 4).long())),
    ("old_logprobs", lambda: corrected(LONG)),
    # losses
    ("estimator", lambda: core.kl_penalty(X, X, "k2")),
    ("ref_logprobs", lambda: core.kl_penalty(X, NARROW, "k1")),
    ("logprobs", lambda: core.kl_penalty(LONG, X, "k1")),
    *(
        ("loss_mask", lambda bad=bad: core.kl_penalty(X, X, "k1", loss_mask=bad))
        for bad in (X, MASK[:1])
    ),
    *(
        ("cliprange_value", lambda bad=bad: core.clipped_value_loss(X, X, X, MASK, bad))
        for bad in (0.0, -0.2, NAN)
    ),
    ("loss_mask", lambda: core.clipped_value_loss(X, X, X, X, 0.2)),
    ("returns", lambda: core.clipped_value_loss(X, X, NARROW, MASK, 0.2)),
    ("old_values", lambda: core.clipped_value_loss(X, LONG, X, MASK, 0.2)),
    ("loss_type", lambda: core.aggregation_weights(MASK, "mean", **COUNTS)),
    ("loss_mask", lambda: core.aggregation_weights(X, "grpo", **COUNTS)),
    *(
        ("max_length", lambda bad=bad: core.aggregation_weights(MASK, "dr_grpo", **COUNTS, max_length=bad))
        for bad in (None, 0)
    ),
    # the bias of clipping
    ("mode", lambda: core.normalization_scale(1.0, 1.0, "off")),
    *(
        (name, lambda given=given: core.logit_space_squares(*given))
        for bad in (NARROW, COLUMN, LONG)
        for name, given in (
            *(("coefficient", (bad, X, X, MASK)), ("logprobs", (X, bad, X, MASK))),
            *(("entropies", (X, X, bad, MASK)),),
        )
    ),
    *(("loss_mask", lambda bad=bad: core.logit_space_squares(X, X, X, bad)) for bad in (X, MASK[0])),
    ("max_rows", lambda: group_rows([1], max_rows=0)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "call"), REFUSED)
def test_bad_input_names_the_field(field, call):
    with pytest.raises(ValueError, match=rf"\b{field}\b"):
        call()
