"""Requests, slots and what is left in them."""

import pytest
import torch

from tests.generation.driving import ENDS, backend_of, episodes, generated, ids_of, play, tiny_model
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.generation.sampling import SamplingSettings

SAMPLED = SamplingSettings(temperature=3.0)


def request(key: int, ids: list[int], limit: int = 8, turn: int = 0) -> TurnRequest:
    return TurnRequest(key, ids, limit, (0, key, turn))


def finish(backend) -> dict[int, list[int]]:
    turns = {}
    while backend.busy:
        turns.update({turn.key: turn.ids for turn in backend.step()})
    return turns


def poison(backend) -> None:
    """Make what free slots hold, and the spare one, visible if anything of it is used."""
    free = [slot for slot, row in enumerate(backend._slots) if row is None]
    free += range(len(backend._slots), backend._cache.slots)
    for tensor in backend._cache._tensors():
        tensor.data[free, :, : backend._cache.used] = torch.nan
        tensor.data[-1] = torch.nan


def test_an_immediate_end() -> None:
    model, prompt = tiny_model(), [5, 6, 7]
    first = generated(model, prompt, 1)
    backend = backend_of(model, ends=first)
    with backend.running():
        backend.add(request(0, prompt, 9))
        assert [turn.ids for turn in backend.step()] == [first]
        assert not backend.busy
        # The token that ended the turn is not in the cache yet; the next turn feeds it.
        row = [*prompt, *first, 8, 9]
        backend.add(request(0, row, 2, 1))
        assert finish(backend)[0] == generated(model, row, 2, first)


def test_a_row_may_drop_the_last_token_and_say_nothing_new() -> None:
    model, prompt = tiny_model(), [5, 6, 7]
    backend = backend_of(model, ends=[])
    with backend.running():
        backend.add(request(0, prompt, 4))
        sampled = finish(backend)[0]
        for row in (prompt + sampled[:-1], prompt + sampled):
            backend.add(request(0, row, 3, 1))
            assert finish(backend)[0] == generated(model, row, 3, [])
            backend.release(0)
            backend.add(request(0, prompt, 4))
            finish(backend)


@pytest.mark.parametrize("settings", [SAMPLED, SamplingSettings(repetition_penalty=1.5)])
def test_a_slot_forgets_its_episode(settings: SamplingSettings) -> None:
    model = tiny_model()

    def alone(key: int, ids: list[int]) -> list[int]:
        backend = backend_of(model, settings)
        with backend.running():
            backend.add(request(key, ids))
            return finish(backend)[key]

    backend = backend_of(model, settings, ends=ENDS)
    prompts = {e.key: e.prompt for e in episodes(12)}
    with backend.running():
        for key in range(6):
            backend.add(request(key, prompts[key]))
        turns = {turn.key: turn.ids for turn in backend.step() + backend.step()}
        for key in (0, 3, 4):
            backend.release(key)
        for key in (6, 7, 8):
            backend.add(request(key, prompts[key]))
        backend.release(7)
        poison_if_floating(backend)
        turns.update({turn.key: turn.ids for turn in backend.step()})
        for key in (9, 10, 11):
            backend.add(request(key, prompts[key]))
        poison_if_floating(backend)
        turns.update(finish(backend))
        assert set(turns) - {0, 3, 4} == {1, 2, 5, 6, 8, 9, 10, 11}
        for key in set(turns) - {0, 3, 4}:
            assert turns[key] == alone(key, prompts[key])


def poison_if_floating(backend) -> None:
    if backend._cache.ids is None:
        poison(backend)
    else:
        free = [slot for slot, row in enumerate(backend._slots) if row is None]
        backend._cache.ids.data[free] = 5


@pytest.mark.long
def test_poison_everywhere_changes_nothing(monkeypatch) -> None:
    model, runs = tiny_model("llama"), []
    for share in (8, 0, 10**9):
        backend = backend_of(model, SAMPLED, capacity=4)
        monkeypatch.setattr(backend, "IDLE_ONE_IN", share)
        step = backend.step

        def poisoned(step=step, backend=backend):
            if backend._cache is not None:
                poison(backend)
            return step()

        monkeypatch.setattr(backend, "step", poisoned)
        with backend.running():
            runs.append(ids_of(play(backend, episodes(14), 5)))
    clean = backend_of(model, SAMPLED)
    with clean.running():
        assert runs == [ids_of(play(clean, episodes(14)))] * 3


def test_a_changed_row_is_refused() -> None:
    backend = backend_of(tiny_model(), ends=[])
    with backend.running():
        backend.add(request(7, [3, 4, 5], 4))
        row = [3, 4, 5, *finish(backend)[7]]
        for at in (0, 2, 4):
            changed = list(row)
            changed[at] = (changed[at] + 1) % 20
            with pytest.raises(RuntimeError, match="episode 7 has changed"):
                backend.add(request(7, changed, 4, 1))
        with pytest.raises(RuntimeError, match="episode 7 has changed"):
            backend.add(request(7, row[:2], 4, 1))
        backend.add(request(7, row, 4, 1))


def test_requests_that_are_refused() -> None:
    backend = backend_of(tiny_model())
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        backend.add(request(0, [3], 0))
    with pytest.raises(ValueError, match="after 0 tokens"):
        backend.add(request(0, [], 1))
    with backend.running():
        backend.add(request(0, [3], 1))
        with pytest.raises(RuntimeError, match="already"):
            backend.add(request(0, [3], 1))
        backend.add(request(1, [3], 9))
        finish(backend)
        backend.release(0)
        backend.release(0)
        backend.add(request(2, [3], 1))
        assert backend.busy
        backend.release(2)
        assert not backend.busy
        assert backend.step() == []


def test_late_requests_are_batched_but_do_not_wait_for_long() -> None:
    backend = backend_of(tiny_model(), ends=[])
    with backend.running():
        for key in range(24):
            backend.add(request(key, [3, 4], 30))
        backend.step()
        backend.add(request(30, [5], 30))
        waited = 0
        while backend._waiting:
            backend.step()
            waited += 1
        assert waited == backend.ADMIT_AFTER + 1
        for key in range(31, 34):
            backend.add(request(key, [5], 30))
        backend.step()
        assert not backend._waiting


def test_logits_that_are_not_finite_are_named() -> None:
    model = tiny_model()
    backend = backend_of(model)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(torch.nan)
    with backend.running():
        backend.add(request(5, [3, 4], 3))
        with pytest.raises(RuntimeError, match="episode 5 at 2 are not finite"):
            backend.step()


def test_an_overflow_stays_in_its_row() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[22] = torch.inf
    backend = backend_of(model)
    with backend.running():
        backend.add(request(0, [3, 22, 4], 3))
        backend.add(request(1, [3, 5], 3))
        with pytest.raises(RuntimeError, match="episode 0"):
            backend.step()
        backend.release(0)
        backend.add(request(2, [3, 5, 6], 3))
        turns = finish(backend)
    assert turns[2] == generated(model, [3, 5, 6], 3)
