"""The source of rollouts that are played on a thread during the previous update.

Rollout k + 1 starts when update k does, with a copy of the weights of that moment. Every rollout is thus
played by the policy of one update ago, whatever the timing; the run equals `rollout_staleness=1`, bit for bit
in float32 on a CPU. `PolicyCopy` plays; `StalePolicies` has the weights for the old log-probabilities. A
resumed run plays its unfinished rollout again.
"""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from queue import SimpleQueue
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerState

from ..envs.base import Row
from ..generation.cached import inference
from ..generation.protocol import Backend
from ..rollout.episode import Episode
from .loop.player import raise_first
from .loop.rollout import Played, Raw, Scored, Sums
from .ppo_config import PPOConfig
from .rollouts import RolloutSource

# Seconds to wait for the thread at the end of a run.
STOP_SECONDS = 2.0
# Attributes that a copied module must not have: forward passes bound to the original module (TRL's fused
# head, autocast), and accelerate's mark of a wrapped forward pass.
PATCHES = ("forward", "_original_forward", "_is_accelerate_prepared")


class PolicyCopy:
    """Copy of the policy, with the trained weights of the last `refresh`.

    Of the unwrapped model `policy` only the parameters `trained` are copied. `prepare` gives the copy the
    precision of the policy's forward pass.
    """

    def __init__(
        self,
        policy: nn.Module,
        trained: Iterable[nn.Parameter],
        prepare: Callable[[nn.Module], nn.Module],
    ) -> None:
        own = {id(parameter): parameter for parameter in trained}
        shared = (t for part in (policy.parameters(), policy.buffers()) for t in part)
        memo: dict[int, object] = {id(tensor): tensor for tensor in shared if id(tensor) not in own}
        # Share frozen 8-bit weights too, which bitsandbytes' layers hold in a plain attribute.
        plain = (getattr(module, "state", None) for module in policy.modules())
        states = (getattr(state, "__dict__", {}) for state in plain)
        memo |= {id(t): t for state in states for t in state.values() if isinstance(t, Tensor)}
        model = copy.deepcopy(policy, memo)
        for module in model.modules():
            for name in PATCHES:
                vars(module).pop(name, None)
        prepared = prepare(model)
        # Keep the uncompiled module, because turns are sampled with it.
        self.model = getattr(prepared, "_orig_mod", prepared)
        self._policy = policy
        pairs = [(memo.get(key), parameter) for key, parameter in own.items()]
        self._pairs = [(mine, theirs) for mine, theirs in pairs if isinstance(mine, Tensor)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's trained weights into this copy."""
        for mine, theirs in self._pairs:
            mine.copy_(theirs)

    @torch.no_grad()
    def why_unfit(self) -> str | None:
        """Return why this copy cannot sample the policy's turns, or None if it can."""
        self.refresh()
        policy, mine = self._logits(self._policy), self._logits(self.model)
        if not torch.allclose(mine, policy, rtol=1e-3, atol=1e-3 * float(policy.std())):
            return "gives other logits"
        for tensor, _ in self._pairs:
            tensor.mul_(1.5).add_(0.1)
        moved = self._logits(self.model)
        self.refresh()
        return "uses the weights in training" if torch.equal(moved, mine) else None

    def _logits(self, model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        with inference(model):
            output = model(input_ids=torch.arange(1, 9, device=device)[None], use_cache=False)
        logits: Tensor = output.logits
        return logits.float()


class Flight(Future[Raw]):
    """A rollout on another thread; `play` must not use collective calls or the trainer's state."""

    def __init__(self, rows: list[Row], play: Callable[[], Raw], device: torch.device) -> None:
        super().__init__()
        # Store the text, because an environment may change its row later.
        self.rows = told_rows(rows)
        self._play, self._device = play, device
        self.seconds = self.ended = 0.0

    def run(self) -> None:
        """Play the rollout, on the thread that calls this."""
        began = time.perf_counter()
        try:
            # Each thread has its own current device.
            if self._device.type != "cpu" and self._device.index is not None:
                torch.accelerator.set_device_index(self._device.index)
            played = self._play()
        except BaseException as error:
            self.set_exception(error)
            return
        self.ended = time.perf_counter()
        self.seconds = self.ended - began
        self.set_result(played)


def rows_ahead(
    args: PPOConfig, device: torch.device, loader: Any, began: int, step: int
) -> Iterator[list[Row]]:
    """Yield the dataset rows of later rollouts, in training's order, on `device`.

    `loader`: a second dataloader over the same rows, at the beginning of the epoch. `began`: number of
    optimizer steps at that time. `step`: number of optimizer steps when training on the next rollout begins.
    """
    batches, micro_batches = loader.batch_sampler, args.gradient_accumulation_steps
    # A run resumed in the middle of an epoch has skipped the epoch's earlier batches.
    passed = 0 if args.ignore_data_skip else began * micro_batches % len(batches)
    first = passed + (step - began) * micro_batches
    epochs = chain.from_iterable(repeat(batches))
    for indices in islice(epochs, first, None, args.micro_batches_per_rollout):
        rows = loader.collate_fn([loader.dataset[i] for i in indices])
        yield send_to_device(rows, device)


@dataclass(eq=False, repr=False)
class OverlappedSource(RolloutSource):
    """Source of rollouts that are played on a thread while the loop trains on the previous rollout.

    The configuration sets `rollout_staleness` to 1, so old weights are kept. The thread plays with a copy
    of the policy, because the loop changes the policy's weights meanwhile.

    `loader_ahead` returns a dataloader, and the number of optimizer steps at its first row.
    """

    loader_ahead: Callable[[], tuple[DataLoader, int]]

    def __post_init__(self) -> None:
        self._flight: Flight | None = None
        self._copy: PolicyCopy | None = None
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._begin()

    def _begin(self) -> None:
        self._ahead: Iterator[list[Row]] | None = None
        self._is_checked = False
        # Seconds and turns of the last rollout during which no update ran.
        self._alone: tuple[float, int] | None = None
        self._collected_at: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager of a complete `train()` that stops the rollout thread at its end."""
        if self._flight is not None and not wait([self._flight], STOP_SECONDS).done:
            raise RuntimeError("A rollout of the last `train()` is still under way; wait for it.")
        self._flight = None
        self.player.engine.calls.resume()
        self._begin()
        self._jobs = SimpleQueue()
        threading.Thread(target=_play_all, args=(self._jobs,), name="rollout", daemon=True).start()
        try:
            yield
        finally:
            self._jobs.put(None)
            if self._flight is not None:
                self.player.engine.calls.interrupt()
                wait([self._flight], STOP_SECONDS)

    def settle(self) -> None:
        """Block until the rollout on the other thread ends; keep the rollout for its update."""
        if self._flight is not None:
            wait([self._flight])

    def next(self, rows: list[Row], weights: Tensor, state: TrainerState) -> tuple[Played, Scored]:
        """Return the rollout of these rows, scored, and start the next rollout."""
        played = super().next(rows, weights, state)
        self._launch(state.global_step, state.max_steps)
        return played

    def play(self, rows: list[Row], step: int) -> Played:
        """Return the rollout of these rows from the other thread; play it now if no thread has started it."""
        flight = self._flight
        if flight is None:
            return self._play_alone(rows, step)
        requested_at = time.perf_counter()
        raw = flight.result()
        # Reset the attribute only now, because `running` interrupts an unfinished rollout that it holds.
        self._flight = None
        if flight.rows != told_rows(rows):
            raise RuntimeError("`rollout_overlap=True`: training reads other rows than were played ahead.")
        raise_first(raw.failure)
        now = time.perf_counter()
        sums = {
            "perf/rollout_wait_seconds": (now - requested_at, 1),
            "perf/rollout_idle_seconds": (max(0.0, requested_at - flight.ended), 1),
            **self._overlap(raw.episodes, flight.seconds, now - requested_at, now),
        }
        return self.player.finish(raw, self.seed(step), sums, step=step)

    def _play_alone(self, rows: list[Row], step: int) -> Played:
        if not self._is_checked:
            self._make_copy()
            self._is_checked = True
        began = time.perf_counter()
        rollout = super().play(rows, step)
        self._collected_at = time.perf_counter()
        self._alone = self._collected_at - began, _turns(rollout.episodes)
        return rollout

    def _launch(self, now: int, max_steps: int) -> None:
        """Start the next rollout on another thread, with the weights before the update."""
        device, step = self.accelerator.device, now + self.args.steps_per_rollout
        if step >= max_steps:
            return
        if self._ahead is None:
            self._ahead = rows_ahead(self.args, device, *self.loader_ahead(), step)
        rows = next(self._ahead)
        play = partial(self._play_ahead, self._backend(now), rows, self.seed(step))
        self._flight = Flight(rows, play, device)
        self._jobs.put(self._flight.run)

    def _make_copy(self) -> None:
        """Copy the policy; raise ValueError if the copy is not alike. All processes must call this."""
        sampler, reason = self.player.sampler, None
        if self.args.use_vllm:
            return
        try:
            if not sampler.is_cached:
                reason = "is not sampled by our cache"
            else:
                if self._copy is None:
                    # An overlap excludes DeepSpeed and FSDP, so prepare the copy for evaluation only.
                    prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
                    with sampler.generating() as model:
                        self._copy = PolicyCopy(model, self.stale.parameters, prepare)
                reason = self._copy.why_unfit()
        except TypeError as error:
            # `copy.deepcopy` may fail for an attribute of the model.
            reason = f"cannot be made ({error})"
        if any(found for found, *_ in sampler.exchange((int(reason is not None), 0, 0))):
            raise ValueError(
                f"`rollout_overlap=True`: a copy of the {type(sampler.policy()).__name__} "
                f"{reason or 'fails on another process'}. Use a vLLM server, or leave it out."
            )

    def _backend(self, version: int) -> Backend:
        """Return a backend for the other thread, with the current weights of step `version`."""
        sampler = self.player.sampler
        if self.args.use_vllm:
            return sampler.vllm.ahead(self.args.generation_slots, version)
        assert self._copy is not None
        self._copy.refresh()
        return sampler.cached(self._copy.model, version)

    def _play_ahead(self, backend: Any, rows: list[Row], seed: tuple[int, ...]) -> Raw:
        """Play a rollout; called on the other thread."""
        with backend.running():
            return self.player.run(self.player.engine, backend, rows, seed)

    def _overlap(self, episodes: list[Episode], seconds: float, waited: float, now: float) -> Sums:
        """Return `perf/overlap`, the saved time divided by the shorter of rollout and update time."""
        period = None if self._collected_at is None else now - self._collected_at
        self._collected_at = now
        if period is None or self._alone is None:
            return {}
        # Assume that rollout and update slow each other down by equal times.
        alone = min(seconds, self._alone[0] * _turns(episodes) / max(1, self._alone[1]))
        update = max(0.0, period - waited - (seconds - alone))
        saved = (2 * alone - seconds - waited) / max(1e-9, min(alone, update))
        return {"perf/overlap": (min(1.0, max(0.0, saved)), 1)}


def _play_all(jobs: SimpleQueue[Any]) -> None:
    """Play all rollouts on one thread, because the allocator keeps each thread's peak memory."""
    for play in iter(jobs.get, None):
        play()
        del play


def _turns(episodes: list[Episode]) -> int:
    return sum(episode.num_turns for episode in episodes)


def told_rows(rows: list[Row]) -> str:
    """Return rows as text, without the addresses of their images."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(rows))
