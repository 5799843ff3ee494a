"""The recorded run of TRL 1.12 is consistent with the PPO formulas, written out independently.

The first half checks every recorded number from the recorded ones it follows from, in plain float64
loops. The second half rebuilds the models under today's transformers and replays the update.
"""

import numpy as np
import pytest
import torch

from tests.kit.oracle import FIXTURE, VARIANTS, Oracle, load_oracle


@pytest.fixture(params=VARIANTS)
def oracle(request) -> Oracle:
    return load_oracle(request.param)


def steps(oracle: Oracle) -> range:
    return range(1, oracle.settings["ppo"]["num_ppo_epochs"] + 1)


def array(oracle: Oracle, name: str) -> np.ndarray:
    return oracle.tensors[name].double().numpy()


def close(actual, expected, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_size_and_coverage():
    size = sum(path.stat().st_size for path in (FIXTURE, FIXTURE.with_suffix(".json")))
    assert size < 1.5e6
    oracle = load_oracle("two_epochs")
    mask = oracle.tensors["query_mask"]
    assert not mask.all(), "some prompts should be padded"
    assert mask[:, -1].all(), "prompts should be padded on the left"
    assert 0.2 < oracle.tensors["step2/pg_clipfrac"] < 0.8
    assert 0.05 < oracle.tensors["step2/vf_clipfrac"] < 0.8
    assert oracle.tensors["kl"].abs().mean() > 0.1
    special = {oracle.settings["tokenizer"][f"{n}_token_id"] for n in ("pad", "eos")}
    assert special.isdisjoint(oracle.tensors["response_ids"].flatten().tolist())


def test_rewards(oracle):
    logprobs, ref = array(oracle, "logprobs"), array(oracle, "ref_logprobs")
    expected = -oracle.settings["ppo"]["kl_coef"] * (logprobs - ref)
    close(array(oracle, "non_score_reward"), expected)
    expected[:, -1] += array(oracle, "scores")
    close(array(oracle, "rewards"), expected)


def test_advantages_and_returns(oracle):
    rewards, values = array(oracle, "rewards"), array(oracle, "values")
    gamma, lam = oracle.settings["ppo"]["gamma"], oracle.settings["ppo"]["lam"]
    batch, length = rewards.shape
    advantages = np.zeros((batch, length))
    for row in range(batch):
        running = 0.0
        for t in reversed(range(length)):
            next_value = values[row, t + 1] if t + 1 < length else 0.0
            running = rewards[row, t] + gamma * next_value - values[row, t] + gamma * lam * running
            advantages[row, t] = running
    close(array(oracle, "advantages_raw"), advantages)
    close(array(oracle, "returns"), advantages + values)
    whitened = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    # Upstream's Bessel correction divides two integers, which torch does in float32.
    close(array(oracle, "advantages"), whitened, torch.finfo(torch.float32).eps)


def test_losses(oracle):
    ppo = oracle.settings["ppo"]
    for n in steps(oracle):
        rows = oracle.tensors[f"step{n}/indices"].numpy()
        old, advantages, values, returns = (
            array(oracle, name)[rows] for name in ("logprobs", "advantages", "values", "returns")
        )
        new, predictions = array(oracle, f"step{n}/new_logprobs"), array(oracle, f"step{n}/vpred")
        policy_loss = value_loss = 0.0
        for i in np.ndindex(old.shape):
            ratio = np.exp(new[i] - old[i])
            clipped = min(max(ratio, 1 - ppo["cliprange"]), 1 + ppo["cliprange"])
            policy_loss += max(-advantages[i] * ratio, -advantages[i] * clipped) / old.size
            low, high = values[i] - ppo["cliprange_value"], values[i] + ppo["cliprange_value"]
            clipped = min(max(predictions[i], low), high)
            errors = (predictions[i] - returns[i]) ** 2, (clipped - returns[i]) ** 2
            value_loss += 0.5 * max(errors) / old.size
        close(array(oracle, f"step{n}/pg_loss"), policy_loss)
        close(array(oracle, f"step{n}/vf_loss"), value_loss)
        close(array(oracle, f"step{n}/loss"), policy_loss + ppo["vf_coef"] * value_loss)
