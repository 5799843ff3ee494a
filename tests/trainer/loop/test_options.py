"""Every option of GRPO's loss is implemented here, or refused by name (test_refused_settings.py).

The implemented ones are held, value and gradient of one micro-batch, against `expected_loss`: the
same loss with plain loops over tokens, from an independent forward pass in float64.
"""

import math

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.kit.fakes import char_tokenizer, tiny_value_model
from tests.kit.microbatch import captured, gradient, loss_and_gradient
from tests.kit.scripted import plain_logprobs
from trl_stppo import STPPOTrainer

CLIP = 0.2
BUDGET = 64


def expected_loss(
    trainer, batch, *, loss_type="grpo", delta=math.inf, beta=0.0, corrected=False, entropy_coef=0.0,
    weight=lambda b, t: 1.0,
):  # fmt: skip
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].size(1)
    logprobs, entropies = plain_logprobs(trainer.model, ids, mask, length)
    rows = [[t for t in range(length) if row[t]] for row in batch["loss_mask"].tolist()]
    tokens = sum(map(len, rows))
    loss = entropy = 0.0
    for b, row in enumerate(rows):
        for t in row:
            share = {
                "grpo": 1 / len(rows) / len(row),
                "dr_grpo": 1 / len(rows) / BUDGET,
                "bnpo": 1 / tokens,
                "dapo": 1 / tokens,
            }[loss_type]
            new, old = logprobs[b, t], batch["old_per_token_logps"][b, t]
            ratio, advantage = torch.exp(new - old), batch["advantages"][b, t]
            first = torch.clamp(ratio, max=delta) * advantage
            second = torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantage
            loss = loss - share * weight(b, t) * torch.min(first, second)
            if beta:
                gap = batch["ref_per_token_logps"][b, t] - new
                kl = torch.exp(gap) - gap - 1
                loss = loss + share * beta * kl * (ratio if corrected else 1.0)
            entropy = entropy + entropies[b, t] / tokens
    return loss - entropy_coef * entropy


def check(trainer, batch, **terms):
    value, grad = loss_and_gradient(trainer, batch)
    expected = expected_loss(trainer, batch, **terms)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)
    wanted = gradient(trainer, expected)
    torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-10)
    assert wanted.norm() > 1e-3, "the case should be interesting"


def test_delta_bounds_the_ratio_of_negative_advantages(tmp_path):
    trainer, batch = captured(tmp_path, delta=1.25)
    check(trainer, batch, delta=1.25)
    unbounded = expected_loss(trainer, batch)
    assert unbounded != expected_loss(trainer, batch, delta=1.25), "no token beyond delta"


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("corrected", [False, True])
def test_beta_adds_the_k3_estimator_of_the_kl(corrected, kl_coef, tmp_path):
    trainer, batch = captured(tmp_path, beta=0.3, use_bias_correction_kl=corrected, kl_coef=kl_coef)
    # At the start the policy is the reference, where k3 has no gradient.
    noise = torch.randn(batch["ref_per_token_logps"].shape, generator=torch.manual_seed(0))
    batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + 0.5 * noise.double()
    check(trainer, batch, beta=0.3, corrected=corrected)


# exp(1e3) is too large for float64 too.
@pytest.mark.parametrize("gap", [1e3, math.inf])
def test_the_ratio_that_corrects_the_kl_cannot_overflow(gap, tmp_path):
    trainer, batch = captured(tmp_path, beta=0.3, use_bias_correction_kl=True)
    b, t = batch["loss_mask"].nonzero()[0].tolist()
    batch["old_per_token_logps"][b, t] = -gap
    batch["ref_per_token_logps"][b, t] = -1e3
    value, grad = loss_and_gradient(trainer, batch)
    assert value > 1e9
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("coefficient", [0.1, -0.1])
def test_entropy_coef_adds_the_mean_entropy_of_the_policys_tokens(coefficient, tmp_path):
    check(*captured(tmp_path, entropy_coef=coefficient), entropy_coef=coefficient)


def test_off_policy_mask_drops_bad_tokens_of_episodes_that_drifted(tmp_path):
    threshold = 0.02
    trainer, batch = captured(tmp_path, off_policy_mask_threshold=threshold)
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        new = plain_logprobs(trainer.model, ids, mask, batch["completion_ids"].size(1))[0]
    gaps = batch["old_per_token_logps"] - new
    drift = [gaps[b][row].mean().item() for b, row in enumerate(batch["loss_mask"])]
    assert min(drift) < threshold < max(drift), "the case should be interesting"

    def keep(b, t):
        return float(batch["advantages"][b, t] >= 0 or drift[b] <= threshold)

    check(trainer, batch, weight=keep)


@pytest.mark.parametrize("shape", ["token", "sequence"])
def test_the_samplers_correction_multiplies_kept_and_clipped_terms_alike(shape, tmp_path):
    trainer, batch = captured(tmp_path)
    size = batch["loss_mask"].shape if shape == "token" else (len(batch["loss_mask"]), 1)
    ratio = 0.5 + torch.rand(size, generator=torch.manual_seed(0)).double()
    batch["importance_sampling_ratio"] = ratio
    check(trainer, batch, weight=lambda b, t: ratio.expand(batch["loss_mask"].shape)[b, t])


def test_the_samplers_correction_reaches_the_clipping_bias(tmp_path):
    trainer, batch = captured(tmp_path, variant="s-ppo")
    seen = []
    trainer._loop.step.exact = type("Spy", (), {"add": lambda self, terms: seen.append(terms.surrogate)})()
    for factor in (1.0, 0.25):
        batch["importance_sampling_ratio"] = torch.full((8, 1), factor, dtype=torch.float64)
        loss_and_gradient(trainer, batch)
    full, quarter = seen
    assert full.is_clipped.any()
    torch.testing.assert_close(quarter.clipped, 0.25 * full.clipped)
    torch.testing.assert_close(quarter.kept, 0.25 * full.kept)


def test_truncated_completions_can_be_masked(tmp_path):
    trainer, batch = captured(tmp_path, mask_truncated_completions=True)
    # No scripted episode ends in the end-of-turn token.
    assert not batch["loss_mask"].any()
    assert not batch["value_mask"].any()
    value, grad = loss_and_gradient(trainer, batch)
    assert value == 0.0
    assert not grad.any()


def test_the_router_loss_of_a_mixture_of_experts_is_added(tmp_path):
    tokenizer = char_tokenizer()
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=8, num_experts=4,
        shared_expert_intermediate_size=8, num_experts_per_tok=2, decoder_sparse_step=1,
        output_router_logits=True, router_aux_loss_coef=0.5, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    losses = {}
    for coefficient in (None, 0.0, 2.0):
        torch.manual_seed(0)
        trainer, batch = captured(
            tmp_path, trainer_class=STPPOTrainer, model=Qwen2MoeForCausalLM(config),
            value_model=tiny_value_model(tokenizer), router_aux_loss_coef=coefficient,
        )  # fmt: skip
        losses[coefficient] = loss_and_gradient(trainer, batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    router = trainer.model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    by_router = gradient(trainer, router)
    for coefficient, used in ((None, 0.5), (2.0, 2.0)):
        added = losses[coefficient][0] - losses[0.0][0]
        torch.testing.assert_close(added.double(), used * router.detach().double(), rtol=1e-4, atol=1e-6)
    assert by_router.norm() > 0
    torch.testing.assert_close(losses[2.0][1] - losses[None][1], 1.5 * by_router, rtol=1e-3, atol=1e-5)


def test_a_lora_policy_gives_the_same_loss(tmp_path):
    """Its reference and old logprobs come by another way; the loss does not."""
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    trainer, batch = captured(tmp_path, peft_config=config, beta=0.3)
    assert (batch["ref_per_token_logps"] - batch["old_per_token_logps"]).abs().max() > 1e-3
    check(trainer, batch, beta=0.3, corrected=True)
