import pytest
import torch

from tests.kit import references
from trl_stppo import core

NAN = float("nan")
SETTINGS = [(0.9, 0.8), (1.0, 1.0), (1.0, 0.95), (0.99, 0.0), (0.0, 0.7)]


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def turns_of(mask):
    return torch.tensor(references.turns_of_mask(mask.tolist()), dtype=torch.int64).view(mask.shape)


def reference_gae(batch, level, gamma, lam, bootstrap=True):
    index = batch.action_mask if level == "token" else batch.turn_index
    function = references.token_gae if level == "token" else references.turn_gae
    return function(
        batch.rewards.tolist(), batch.values.tolist(), index.tolist(), gamma, lam,
        batch.bootstrap_values.tolist() if bootstrap else None,
    )  # fmt: skip


def run_gae(batch, level, gamma, lam, bootstrap=True):
    index = batch.action_mask if level == "token" else batch.turn_index
    function = core.token_gae if level == "token" else core.turn_gae
    bootstrap_values = batch.bootstrap_values if bootstrap else None
    return function(batch.rewards, batch.values, index, gamma, lam, bootstrap_values=bootstrap_values)


def test_token_gae_by_hand(close):
    # agent tokens 0, 1, 3; token 2 is an observation and takes no step. gamma = 0.5, lam = 0.5
    rewards = tensor([0.0, 1.0, NAN, 2.0])
    values = tensor([1.0, 2.0, NAN, 4.0])
    mask = torch.tensor([[True, True, False, True]])
    # delta_3 = 2 + 0.5 * 0 - 4 = -2         A_3 = -2
    # delta_1 = 1 + 0.5 * 4 - 2 =  1         A_1 =  1 + 0.25 * -2  =  0.5
    # delta_0 = 0 + 0.5 * 2 - 1 =  0         A_0 =  0 + 0.25 * 0.5 =  0.125
    advantages, returns = core.token_gae(rewards, values, mask, 0.5, 0.5)
    close(advantages, [[0.125, 0.5, 0.0, -2.0]])
    close(returns, [[1.125, 2.5, 0.0, 2.0]])


def test_token_gae_bootstrap_by_hand(close):
    rewards, values = tensor([0.0, 1.0, 9.0]), tensor([1.0, 2.0, 9.0])
    mask = torch.tensor([[True, True, False]])
    # delta_1 = 1 + 0.5 * 6 - 2 = 2    A_1 = 2;    delta_0 = 0 + 0.5 * 2 - 1 = 0    A_0 = 0.5
    advantages, _ = core.token_gae(
        rewards, values, mask, 0.5, 0.5, bootstrap_values=torch.tensor([6.0]).double()
    )
    close(advantages, [[0.5, 2.0, 0.0]])


def test_turn_gae_by_hand(close):
    # turn 0: tokens 0, 1; observation; turn 1: tokens 3, 4. gamma = 0.5, lam = 0.5
    rewards = tensor([1.0, 2.0, NAN, 0.0, 4.0])
    values = tensor([2.0, NAN, NAN, 6.0, NAN])
    index = torch.tensor([[0, 0, -1, 1, 1]])
    # R_1 = 4, delta_1 = 4 - 6 = -2, A_1 = -2;  R_0 = 3, delta_0 = 3 + 0.5 * 6 - 2 = 4,
    # A_0 = 4 + 0.25 * -2 = 3.5
    advantages, returns = core.turn_gae(rewards, values, index, 0.5, 0.5)
    close(advantages, [[3.5, 3.5, 0.0, -2.0, -2.0]])
    close(returns, [[5.5, 0.0, 0.0, 4.0, 0.0]])
    # bootstrap 8: delta_1 = 4 + 0.5 * 8 - 6 = 2, A_1 = 2, A_0 = 4 + 0.25 * 2 = 4.5
    bootstrap = torch.tensor([8.0]).double()
    advantages, _ = core.turn_gae(rewards, values, index, 0.5, 0.5, bootstrap_values=bootstrap)
    close(advantages, [[4.5, 4.5, 0.0, 2.0, 2.0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
@pytest.mark.parametrize("level", ["token", "turn"])
def test_gae_against_reference(make_batch, close, level, gamma, lam, bootstrap, dtype):
    for seed in range(3):
        batch = make_batch(seed, dtype=dtype)
        actual = run_gae(batch, level, gamma, lam, bootstrap)
        expected = reference_gae(batch, level, gamma, lam, bootstrap)
        close(actual[0], expected[0])
        close(actual[1], expected[1])
        assert actual[0].dtype == actual[1].dtype == dtype


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 300])
def test_doubling_covers_every_length(close, length):
    # all tokens count and the only reward is on the last: every pass of the doubling is needed
    values = torch.zeros(1, length, dtype=torch.float64)
    rewards = values.clone()
    rewards[0, -1] = 1.0
    advantages, _ = core.token_gae(rewards, values, values == 0, 0.99, 0.9)
    close(advantages, [[(0.99 * 0.9) ** (length - 1 - t) for t in range(length)]])


def test_one_token_turns_make_turn_gae_token_gae(make_batch, close):
    batch = make_batch(14)
    # every agent token a turn of its own
    index = (batch.action_mask.cumsum(1) - 1).masked_fill(~batch.action_mask, -1)
    turn = core.turn_gae(batch.rewards, batch.values, index, 0.9, 0.8)
    token = core.token_gae(batch.rewards, batch.values, batch.action_mask, 0.9, 0.8)
    close(turn[0], token[0])
    close(turn[1], token[1])


@pytest.mark.parametrize("level", ["token", "turn"])
def test_gamma_lam_one_is_monte_carlo(make_batch, close, level):
    batch = make_batch(15)
    _, returns = run_gae(batch, level, 1.0, 1.0, bootstrap=False)
    for b in range(6):
        for t in range(23):
            counted = core.turn_starts(batch.turn_index)[b, t] if level == "turn" else True
            if batch.action_mask[b, t] and counted:
                to_come = batch.rewards[b, t:][batch.action_mask[b, t:]].sum()
                close(returns[b, t], to_come)


def test_zero_reward_turns_are_still_turns(close):
    # three turns, only the last is rewarded: the first is two discounts away, not none
    index = torch.tensor([[0, -1, 1, 1, 2]])
    zeros = torch.zeros(1, 5, dtype=torch.float64)
    turn_rewards = tensor([0.0, 0.0, 0.0])
    rewards = core.token_rewards(index, scores=torch.tensor([8.0]).double(), turn_rewards=turn_rewards)
    advantages, _ = core.turn_gae(rewards, zeros, index, 0.5, 1.0)
    close(advantages, [[2.0, 0.0, 4.0, 4.0, 8.0]])


def test_a_final_score_of_zero_does_not_move_the_end_of_the_episode(close):
    # the last turn has neither reward nor score; its value still decides the turn before it
    index = torch.tensor([[0, -1, 1]])
    rewards = core.token_rewards(index, scores=torch.tensor([0.0]).double(), turn_rewards=tensor([3.0, 0.0]))
    close(rewards, [[3.0, 0.0, 0.0]])
    advantages, _ = core.turn_gae(rewards, tensor([1.0, 7.0, 5.0]), index, 1.0, 0.0)
    # delta_1 = 0 - 5, delta_0 = 3 + 5 - 1
    close(advantages, [[7.0, 0.0, -5.0]])


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e3])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_gae_ignores_what_is_not_an_agent_token(make_batch, level, garbage):
    batch = make_batch(16)
    clean = run_gae(batch, level, 0.9, 0.8)
    used = batch.action_mask if level == "token" else core.turn_starts(batch.turn_index)
    batch.rewards = batch.rewards.masked_fill(~batch.action_mask, garbage)
    batch.values = batch.values.masked_fill(~used, garbage)
    # an episode without agent tokens does not use its bootstrap value either
    no_turns = ~batch.action_mask.any(dim=1)
    batch.bootstrap_values = batch.bootstrap_values.masked_fill(no_turns, garbage)
    batch.values.requires_grad_()
    poisoned = run_gae(batch, level, 0.9, 0.8)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b.detach())
        assert (a[~batch.action_mask] == 0).all()
    (poisoned[0].square().sum() + poisoned[1].square().sum()).backward()
    assert torch.isfinite(batch.values.grad).all()
    assert (batch.values.grad[~used] == 0).all()


@pytest.mark.parametrize("level", ["token", "turn"])
def test_gae_padding_and_episode_order_change_nothing(make_batch, close, level):
    batch, pad = make_batch(18), torch.nn.functional.pad
    plain = run_gae(batch, level, 0.9, 0.8)
    padded = make_batch(18)
    for name in ("rewards", "values"):
        setattr(padded, name, pad(getattr(batch, name), (3, 10), value=NAN))
    padded.turn_index = pad(batch.turn_index, (3, 10), value=-1)
    padded.action_mask = padded.turn_index >= 0
    for a, b in zip(run_gae(padded, level, 0.9, 0.8), plain, strict=True):
        close(a, pad(b, (3, 10)))
    for name in ("rewards", "values", "turn_index", "action_mask", "bootstrap_values"):
        setattr(batch, name, getattr(batch, name).flip(0))
    for a, b in zip(run_gae(batch, level, 0.9, 0.8), plain, strict=True):
        close(a, b.flip(0))


@pytest.mark.parametrize("level", ["token", "turn"])
def test_gae_gradcheck(make_batch, level):
    batch = make_batch(20, batch_size=3, length=6)

    def run(rewards, values, bootstrap_values):
        batch.rewards, batch.values, batch.bootstrap_values = rewards, values, bootstrap_values
        return run_gae(batch, level, 0.9, 0.8)

    inputs = (batch.rewards, batch.values, batch.bootstrap_values)
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("level", ["token", "turn"])
def test_gae_edges(level):
    function = core.token_gae if level == "token" else core.turn_gae
    wrap = (lambda m: m) if level == "token" else turns_of
    one = torch.ones(1, 1).double()
    advantages, returns = function(3 * one, one, wrap(one.bool()), 0.9, 0.9)
    assert (advantages.item(), returns.item()) == (2.0, 3.0)
    nothing = function(one, one, wrap(~one.bool()), 0.9, 0.9, bootstrap_values=torch.ones(1))
    assert [x.item() for x in nothing] == [0.0, 0.0]
    empty = torch.zeros(0, 3)
    assert function(empty, empty, wrap(empty.bool()), 1.0, 1.0)[0].shape == (0, 3)
    empty = torch.zeros(2, 0)
    assert function(empty, empty, wrap(empty.bool()), 1.0, 1.0)[0].shape == (2, 0)


def test_half_precision_is_computed_in_float32():
    # 1024 rewards of 1/1024: bfloat16 sums would stall at 1/4
    x = torch.full((1, 1024), 1 / 1024, dtype=torch.bfloat16)
    mask = torch.ones(1, 1024, dtype=torch.bool)
    _, returns = core.token_gae(x, torch.zeros_like(x), mask, 1.0, 1.0)
    assert returns.dtype == torch.float32
    assert returns[0, 0].item() == pytest.approx(1.0)
    assert core.whiten(x, mask).dtype == torch.float32


@pytest.mark.parametrize(
    ("turns", "steps", "lam"),
    [(3, 3, 0.9), (1, 2, 0.9**0.5), (4, 88, 0.9 ** (1 / 22)), (0, 0, 1.0)],
)
def test_the_default_lambda_is_that_of_a_turn_over_its_steps(turns, steps, lam):
    assert core.default_lam(turns, steps) == pytest.approx(lam, abs=1e-15)
    if turns:
        assert core.default_lam(turns, steps) ** (steps / turns) == pytest.approx(0.9)
