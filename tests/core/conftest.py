"""Random ragged batches for the tests of `core`."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.kit import references


def _random_spans(rng, length):
    """Turns with gaps of 0 to 3 tokens; the last one sometimes ends at the last position."""
    spans, position = [], rng.randint(0, 2)
    while position < length and len(spans) < 5:
        end = min(length, position + rng.randint(1, 5))
        spans.append((position, end))
        position = end + rng.choice([0, 1, 1, 2, 3])
    return spans


def _make_batch(seed, batch_size=6, length=23, dtype=torch.float64):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        # Drawn in float64 always, so that float32 batches hold the same numbers, rounded.
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (scale * drawn).to(dtype)

    spans = [_random_spans(rng, rng.randint(1, length)) for _ in range(batch_size - 2)]
    spans += [[], [(0, 1), (1, 2), (length - 2, length)]]
    index = torch.tensor(references.turn_index(spans, length))
    action_mask = index >= 0
    shape = (batch_size, length)
    old_logprobs = -normal(*shape).abs()
    return SimpleNamespace(
        spans=spans, turn_index=index, action_mask=action_mask,
        loss_mask=action_mask & (torch.rand(shape, generator=generator) < 0.8),
        old_logprobs=old_logprobs, logprobs=old_logprobs + normal(*shape, scale=0.3),
        rewards=normal(*shape), values=normal(*shape), old_values=normal(*shape),
        returns=normal(*shape), advantages=normal(*shape), scores=normal(batch_size),
        bootstrap_values=normal(batch_size), turn_rewards=normal(batch_size, 5),
    )  # fmt: skip


@pytest.fixture
def make_batch():
    """`make_batch(seed, batch_size=6, length=23, dtype=float64)`: a ragged batch as a namespace.

    The last row but one has no turns; the last has two adjacent one-token turns and a turn that
    ends at the last position.
    """
    return _make_batch


@pytest.fixture
def close():
    """Asserts agreement with a plain-loop reference: rtol 1e-10 in float64, 1e-5 in float32."""

    def check(actual, expected, *, rtol=None, atol=None):
        expected = torch.as_tensor(expected, dtype=torch.float64)
        if rtol is None:
            rtol = 1e-10 if actual.dtype == torch.float64 else 1e-5
        if atol is None:
            atol = 1e-12 if actual.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)

    return check
