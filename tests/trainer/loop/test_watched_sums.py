"""Figures that are merged from micro-batches and processes, against exact ones."""

import math

import pytest
import torch

from trl_stppo.trainer.loop.metrics import MiniBatchMetrics


def drift(per_token: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A micro-batch of one turn per episode whose log ratios are `per_token`, [B, T]."""
    old = torch.full_like(per_token, -0.7)
    inputs = {
        "loss_mask": torch.ones_like(per_token, dtype=torch.bool),
        "turn_index": torch.zeros_like(per_token, dtype=torch.int64),
    }
    return inputs, old + per_token, old


def effective(log_ratios: list[float]) -> float:
    """Effective sample size as a share, with ratios above 8 counted as 8."""
    capped = [min(x, math.log(8.0)) for x in log_ratios]
    ratios = [math.exp(x - max(capped)) for x in capped]
    return math.fsum(ratios) ** 2 / len(ratios) / math.fsum(r * r for r in ratios)


@pytest.mark.parametrize(
    ("tokens", "mean", "spread"), [(1000, -0.03, 0.1), (4000, -0.02, 0.2), (120, 0.01, 0.1)]
)
def test_the_effective_sample_size_of_long_episodes_is_exact_over_two_processes(tokens, mean, spread):
    generator = torch.Generator().manual_seed(tokens)
    shape = (64, tokens)
    per_token = mean + spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    sent = []
    for process in per_token.chunk(2):
        metrics = MiniBatchMetrics()
        for part in process.split([7, 25]):
            metrics.add_drift(*drift(part))
        metrics.flush(lambda flat: sent.append(flat) or flat, 0.0)
    result = MiniBatchMetrics()
    result.add_drift(*drift(per_token[:1]))
    figures = result.flush(lambda _: torch.cat(sent), 0.0)
    expected = effective(per_token.sum(1).tolist())
    assert expected < 0.99
    assert figures["policy/episode_ess"] == pytest.approx(expected, rel=1e-9)
    assert figures["policy/turn_ess"] == pytest.approx(effective(per_token.mean(1).tolist()), rel=1e-9)


def test_without_an_episode_that_counts_the_effective_sample_size_is_whole():
    inputs, *logprobs = drift(torch.zeros(2, 3, dtype=torch.float64))
    inputs["loss_mask"] = torch.zeros_like(inputs["loss_mask"])
    metrics = MiniBatchMetrics()
    metrics.add_drift(inputs, *logprobs)
    assert metrics.flush(lambda flat: flat, 0.0)["policy/episode_ess"] == 1.0
