"""The recorded run of TRL 1.12 is consistent with the PPO formulas, written out independently.

The first half checks every recorded number from the recorded ones it follows from, in plain float64
loops. The second half rebuilds the models under today's transformers and replays the update.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kit.oracle import FIXTURE, VARIANTS, Oracle, build_models, load_oracle


@pytest.fixture(params=VARIANTS)
def oracle(request) -> Oracle:
    return load_oracle(request.param)


def steps(oracle: Oracle) -> range:
    return range(1, oracle.settings["ppo"]["num_ppo_epochs"] + 1)


def array(oracle: Oracle, name: str) -> np.ndarray:
    return oracle.tensors[name].double().numpy()


def close(actual, expected, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def rounded(oracle: Oracle, size: float) -> float:
    """How far another machine's number may lie if the largest of its kind is `size`.

    Qwen2 calculates its norms in float32, two in a layer and one behind, whatever its weights are in.
    """
    norms = 2 * oracle.settings["model"]["num_hidden_layers"] + 1
    return norms * torch.finfo(torch.float32).eps * size


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


def model_inputs(oracle: Oracle) -> dict[str, Tensor]:
    """Model inputs of prompt and response, built from the recorded ids and mask."""
    ids = torch.cat([oracle.tensors["query_ids"], oracle.tensors["response_ids"]], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : oracle.tensors["query_mask"].shape[1]] = oracle.tensors["query_mask"]
    return {"input_ids": ids, "attention_mask": mask}


def token_logprobs(model, oracle: Oracle) -> Tensor:
    start = oracle.tensors["query_ids"].shape[1]
    logits = model(**model_inputs(oracle)).logits[:, start - 1 : -1]
    logits = logits / (oracle.settings["ppo"]["temperature"] + 1e-7)
    responses = oracle.tensors["response_ids"].unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, responses).squeeze(-1)


def all_scores(model, oracle: Oracle) -> Tensor:
    """Output of the score head at every position, the response's last token included."""
    return model.score(model.model(**model_inputs(oracle)).last_hidden_state).squeeze(-1)


@torch.no_grad()
def test_rebuilt_models_reproduce_the_rollout(oracle):
    models = build_models(oracle)
    start = oracle.tensors["query_ids"].shape[1]
    for name, mine in {
        "logprobs": token_logprobs(models.policy, oracle),
        "ref_logprobs": token_logprobs(models.ref, oracle),
        "values": all_scores(models.value, oracle)[:, start - 1 : -1],
        "scores": all_scores(models.reward, oracle)[:, -1],
    }.items():
        recorded = array(oracle, name)
        close(mine, recorded, rounded(oracle, abs(recorded).max()))
    row = oracle.tensors["response_ids"][0].tolist()
    assert models.tokenizer(models.tokenizer.decode(row))["input_ids"] == row


def test_replayed_update_reproduces_gradients_and_weights(oracle):
    models, ppo, t = build_models(oracle), oracle.settings["ppo"], oracle.tensors
    trained = {"policy": models.policy, "value": models.value}
    parameters = [p for model in trained.values() for p in model.parameters()]
    rate = oracle.settings["optimizer"]["lr"]
    optimizer = torch.optim.SGD(parameters, lr=rate)
    start = t["query_ids"].shape[1]
    # A gradient went through the norms twice; a loss has the error of what it multiplies.
    off_gradient, off = (
        0.0,
        2 * rounded(oracle, t["logprobs"].abs().max() * t["returns"].abs().max()),
    )
    for n in steps(oracle):
        ratio = (token_logprobs(models.policy, oracle) - t["logprobs"]).exp()
        clipped = ratio.clamp(1 - ppo["cliprange"], 1 + ppo["cliprange"])
        policy_loss = -torch.min(ratio * t["advantages"], clipped * t["advantages"]).mean()
        values = all_scores(models.value, oracle)[:, start - 1 : -1]
        change = (values - t["values"]).clamp(-ppo["cliprange_value"], ppo["cliprange_value"])
        errors = (values - t["returns"]) ** 2, (t["values"] + change - t["returns"]) ** 2
        value_loss = 0.5 * torch.max(*errors).mean()
        optimizer.zero_grad()
        (policy_loss + ppo["vf_coef"] * value_loss).backward()
        close(policy_loss.item(), array(oracle, f"step{n}/pg_loss"), off)
        close(value_loss.item(), array(oracle, f"step{n}/vf_loss"), off)
        grads = {kind: oracle.state(f"step{n}/grad/{kind}") for kind in trained}
        largest = max(grad.abs().max() for each in grads.values() for grad in each.values())
        off_gradient += 2 * rounded(oracle, largest)
        for kind, model in trained.items():
            for name, parameter in model.named_parameters():
                close(parameter.grad, grads[kind][name], off_gradient)
        optimizer.step()
        for kind, model in trained.items():
            after = oracle.state(f"step{n}/after/{kind}")
            for name, parameter in model.named_parameters():
                close(parameter.detach(), after[name], rate * off_gradient)
