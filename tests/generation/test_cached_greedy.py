"""The cached backend samples what `generate` does, whatever else is in flight."""

from functools import cache

import pytest
import torch

from tests.generation.driving import backend_of, episodes, generated, ids_of, play, tiny_model
from tests.kit.tiers import quick
from trl_stppo.generation.sampling import SamplingSettings

KINDS = ["gpt2", "qwen2", "qwen3", "llama"]
CASES = [(kind, attention) for kind in KINDS for attention in ("sdpa", "eager")]
CAPACITIES = (1, 3, None)
# Each kind with each attention, and in turn with each capacity.
NOW = [(*case, CAPACITIES[i % 3]) for i, case in enumerate(CASES)]


@cache
def model_of(kind: str, attention: str):
    return tiny_model(kind, attention)


@cache
def expected(kind: str, attention: str) -> dict[int, list[list[int]]]:
    """Every turn by a `generate` of its own, episode by episode."""
    model, turns = model_of(kind, attention), {}
    for episode in episodes():
        row, turns[episode.key] = list(episode.prompt), []
        for turn, limit in enumerate(episode.limits):
            sampled = generated(model, row, limit)
            turns[episode.key].append(sampled)
            row += sampled + (episode.observations[turn : turn + 1] or [[]])[0]
    return turns


@pytest.mark.parametrize(
    ("kind", "attention", "capacity"),
    quick([(*case, capacity) for case in CASES for capacity in CAPACITIES], *NOW),
)
def test_any_schedule_equals_generate(kind: str, attention: str, capacity: int | None) -> None:
    backend = backend_of(model_of(kind, attention), capacity=capacity)
    with backend.running():
        for seed in range(2):
            assert ids_of(play(backend, episodes(), seed)) == expected(kind, attention)
            assert capacity == 1 or backend.midway > 5


PREFILLS = [(kind, tokens) for kind in ("gpt2", "llama") for tokens in (1, 7, 40)]


@pytest.mark.parametrize(("kind", "prefill_tokens"), quick(PREFILLS, ("gpt2", 1), ("llama", 7), ("gpt2", 40)))
def test_prefill_in_pieces_changes_nothing(kind: str, prefill_tokens: int) -> None:
    backend = backend_of(model_of(kind, "sdpa"))
    backend.PREFILL_TOKENS = prefill_tokens
    sizes = []
    handle = backend.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with backend.running():
        assert ids_of(play(backend, episodes(), 1)) == expected(kind, "sdpa")
    handle.remove()
    assert all(rows * width <= prefill_tokens for rows, width in sizes if width > 1)


def test_few_idle_slots_are_kept_and_many_are_closed(monkeypatch) -> None:
    moved = []
    backend = backend_of(model_of("gpt2", "sdpa"))
    original = type(backend)._close_ranks
    monkeypatch.setattr(
        type(backend),
        "_close_ranks",
        lambda self, seated, cache: (moved.append(len(seated)), original(self, seated, cache)),
    )
    for share in (0, 10**9):
        moved.clear()
        monkeypatch.setattr(type(backend), "IDLE_ONE_IN", share)
        with backend.running():
            assert ids_of(play(backend, episodes(), 3)) == expected("gpt2", "sdpa")
        assert bool(moved) == bool(share)


# The rotary models' eager attention takes its softmax in float32.
@pytest.mark.parametrize(("kind", "attention", "tolerance", "temperature"), [
    *((kind, "sdpa", 1e-10, 0.7) for kind in KINDS),
    *(("gpt2", "eager", 1e-10, 1.0), ("qwen2", "eager", 1e-5, 1.0)),
])  # fmt: skip
def test_logprobs_are_those_of_a_forward_pass(
    kind: str, attention: str, tolerance: float, temperature: float
) -> None:
    model = model_of(kind, attention)
    backend = backend_of(model, SamplingSettings(do_sample=True, temperature=temperature))
    todo = episodes()
    with backend.running():
        play(backend, todo, 2)
    for episode in todo:
        with torch.no_grad():
            logits = model(torch.tensor([episode.ids])).logits[0] / temperature
        logprobs = logits.log_softmax(-1)
        for start, turn in zip(episode.starts, episode.turns, strict=True):
            at = torch.arange(start, start + len(turn.ids))
            assert episode.ids[start : start + len(turn.ids)] == turn.ids
            want = logprobs[at - 1, torch.tensor(turn.ids)]
            got = torch.tensor(turn.logprobs, dtype=torch.float64)
            assert (got - want).abs().max() < tolerance
