"""Draws follow the distribution and belong to the turn, not to the batch."""

import pytest
import torch
from transformers import GenerationConfig

from tests.generation.driving import backend_of, episodes, ids_of, play, tiny_model
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.generation.sampling import Sampler, SamplingSettings, turn_random

PLAIN = SamplingSettings()
SETTINGS = [
    SamplingSettings(), SamplingSettings(temperature=2.0),
    SamplingSettings(temperature=1.7, top_k=3), SamplingSettings(temperature=1.3, top_p=0.8),
    SamplingSettings(temperature=1.5, min_p=0.3), SamplingSettings(repetition_penalty=1.8),
    SamplingSettings(temperature=1.4, top_k=4, top_p=0.9, min_p=0.05, repetition_penalty=0.6),
]  # fmt: skip


def uniforms(count: int) -> torch.Tensor:
    return torch.tensor([turn_random((3, i)).random() for i in range(count)], dtype=torch.float64)


def warped(settings: SamplingSettings, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Probabilities by the processors that `generate` builds itself."""
    config = GenerationConfig(**vars(settings))
    processors = tiny_model()._get_logits_processor(config, input_ids_seq_length=ids.shape[1])
    return processors(ids, logits.clone()).softmax(-1)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Standard deviations by which the statistic lies above what chance gives."""
    live = probabilities > 0
    assert (counts[~live] == 0).all()
    expected = probabilities[live].double() * counts.sum()
    statistic = ((counts[live] - expected) ** 2 / expected).sum()
    freedom = max(1, int(live.sum()) - 1)
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_warped_distribution(settings: SamplingSettings) -> None:
    logits = torch.tensor([[1.0, 0.2, -0.5, 2.0, -2.0]], dtype=torch.float64)
    ids = torch.tensor([[3, 0, 0]])
    count = 20000
    tokens, logprobs = Sampler(settings)(logits.expand(count, -1), uniforms(count), ids.expand(count, -1))
    counts = tokens.bincount(minlength=5)
    assert chi_square(counts, warped(settings, ids, logits)[0]) < 6
    tempered = (logits[0] / settings.temperature).log_softmax(-1)
    assert torch.allclose(logprobs, tempered[tokens], atol=1e-12)


def test_a_turn_does_not_depend_on_its_company() -> None:
    model, settings = tiny_model(), SamplingSettings(temperature=1.2, top_p=0.9)
    runs = []
    for capacity, seed in ((1, None), (None, None), (3, 1), (4, 2)):
        backend = backend_of(model, settings, capacity=capacity)
        with backend.running():
            runs.append(ids_of(play(backend, episodes(), seed)))
    assert all(run == runs[0] for run in runs)


def test_other_seeds_draw_other_tokens() -> None:
    backend = backend_of(tiny_model(), SamplingSettings(temperature=5.0), ends=[])
    seeds = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0), (2**70, 0, 0)]
    with backend.running():
        for key, seed in enumerate(seeds):
            backend.add(TurnRequest(key, [3, 4, 5], 12, seed))
        turns = {}
        while backend.busy:
            turns.update({turn.key: tuple(turn.ids) for turn in backend.step()})
    assert turns[0] == turns[4]
    assert len(set(turns.values())) == len(seeds) - 1


def test_the_seeds_numbers_are_pinned() -> None:
    assert turn_random((1, 2, 3)).random() == 0.5632975547548386
    assert turn_random((12, 3)).random() != turn_random((1, 23)).random()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [PLAIN, SamplingSettings(top_p=0.95)])
def test_impossible_tokens_are_never_drawn(settings: SamplingSettings, dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 300).to(dtype)
    logits[torch.rand(200, 300) < 0.7] = -torch.inf
    logits[:, 0] = logits[:, -1] = -torch.inf
    edges = [0.0, 5e-324, 2.0**-60, 0.5, 1 - 2.0**-30, 1 - 2.0**-53, 1.0]
    for edge in edges:
        share = torch.full((200,), edge, dtype=torch.float64)
        tokens, logprobs = Sampler(settings)(logits, share, None)
        assert logprobs.isfinite().all()
        if settings is PLAIN:
            possible = logits.isfinite()
            first = possible.int().argmax(1)
            last = 299 - possible.flip(1).int().argmax(1)
            assert edge > 1e-9 or torch.equal(tokens, first)
            assert edge < 1 - 1e-12 or torch.equal(tokens, last)


def test_an_impossible_token_in_a_crooked_sum_is_not_drawn() -> None:
    from trl_stppo.generation.sampling import _invert

    weights = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64)
    sums = torch.tensor([[0.5, 0.5 + 1e-16 * 2, 1.0]], dtype=torch.float64)
    assert _invert(weights, sums, torch.tensor([[0.5]], dtype=torch.float64)).item() != 1


@pytest.mark.parametrize("settings", [PLAIN, SETTINGS[-1], SamplingSettings(do_sample=False)])
def test_large_tables_are_drawn_in_parts(settings: SamplingSettings, monkeypatch) -> None:
    logits, ids = torch.randn(7, 11), torch.randint(11, (7, 4))
    share = uniforms(7) if settings.do_sample else None
    whole = Sampler(settings)(logits, share, ids)
    monkeypatch.setattr(Sampler, "TABLE", 25)
    parts = Sampler(settings)(logits, share, ids)
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1])


@pytest.mark.parametrize("temperature", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_greedy_takes_the_largest_penalised_logit(temperature, penalty: float) -> None:
    settings = SamplingSettings(False, temperature, repetition_penalty=penalty)
    logits, ids = torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([[0, 0]])
    tokens, logprobs = Sampler(settings)(logits, None, ids)
    assert tokens.item() == (0 if penalty == 1 else 1)
    want = (logits / (temperature or 1.0)).log_softmax(-1)[0, tokens]
    assert torch.allclose(logprobs, want)
