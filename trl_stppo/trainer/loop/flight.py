"""A rollout on a thread of its own, and the rows that it plays."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar

import torch
from accelerate.utils import send_to_device

from ...threads import DaemonThread
from ..bridge import Bridge
from ..planning.rows import Row

Played = TypeVar("Played")


class Flight(Generic[Played]):
    """One rollout on another thread; `play` makes no collective call and touches no state of the trainer."""

    def __init__(self, rows: list[Row], play: Callable[[], Played], device: torch.device) -> None:
        self.rows = repr(rows)  # now, as an environment may change its row
        self._play, self._device = play, device
        self.seconds = self.ended = 0.0
        self._future: Future[Played] = Future()
        self.thread = DaemonThread(self._run, "rollout")
        self.thread.start()

    def result(self) -> Played:
        """Block until the rollout ends; return what `play` returned, or raise its error."""
        return self._future.result()

    def _run(self) -> None:
        began = time.perf_counter()
        finish: Callable[[], None]
        try:
            if self._device.type != "cpu" and self._device.index is not None:  # per thread
                torch.accelerator.set_device_index(self._device.index)
            finish = partial(self._future.set_result, self._play())
        except BaseException as error:
            finish = partial(self._future.set_exception, error)
        self.ended = time.perf_counter()
        self.seconds = self.ended - began
        finish()


class RowsAhead:
    """The rows of later rollouts, in the order of training's loader.

    `loader` is another one over the same rows, at the beginning of the epoch; the run then had taken `began`
    optimizer steps, and has taken `step` when the first rollout to come is trained on.
    """

    def __init__(self, host: Bridge, loader: Any, began: int, step: int) -> None:
        args, batches = host.args, loader.batch_sampler
        micro_batches = args.gradient_accumulation_steps
        # A run that was resumed in the middle of an epoch has passed over its batches.
        passed = 0 if args.ignore_data_skip else began * micro_batches % len(batches)
        first = passed + (step - began) * micro_batches
        self._device = host.accelerator.device
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        epochs = chain.from_iterable(repeat(batches))
        self._indices = islice(epochs, first, None, args.micro_batches_per_rollout)

    def next(self) -> list[Row]:
        """Return the rows of the next rollout."""
        rows = self._collate([self._dataset[i] for i in next(self._indices)])
        moved: list[Row] = send_to_device(rows, self._device)
        return moved
