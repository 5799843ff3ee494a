"""Records a few episodes of every update, with the update's values for each of their tokens.

The first rows of a process's rollout batch are recorded. Mini-batches are shuffled in every epoch, so
each row has its number as a column; the passes of the update store values by that number in tables on
the device, which are copied to the host once, when the update is over. Recording draws no random
numbers, does not change training's computation, and a failure in it does not end the training.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from transformers import TrainerCallback

from ...core import ClippedSurrogate
from ...trace.files import FOLDER, next_start, write_update
from ...trace.format import TracedUpdate
from ...trace.pieces import cut
from ..batch import Batch
from ..bridge import Bridge, is_warming_up
from ..loop.player import EpisodePlayer
from ..loop.rollout import Rollout
from .record import begin_records, complete_records

logger = logging.getLogger(__name__)

# Columns of the rollout batch, [B, T].
COLUMNS = ("turn_index", "loss_mask", "advantages", "old_per_token_logps")
OF_CRITIC = ("values", "returns", "value_mask")


@dataclass
class OpenRecord:
    """Unfinished record of a rollout batch and its update, or of an evaluation."""

    header: dict[str, Any]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    batch: dict[str, Tensor] = field(default_factory=dict)
    passes: dict[str, Tensor] = field(default_factory=dict)
    outcomes: list[tuple[str, Tensor]] = field(default_factory=list)


class TraceRecorder(TrainerCallback):
    """Records this process's share of the `trace_episodes` episodes of each update."""

    def __init__(self, host: Bridge, player: EpisodePlayer) -> None:
        self._host, self._player = host, player
        accelerator, episodes = host.accelerator, host.args.trace_episodes
        share, rest = divmod(episodes, accelerator.num_processes)
        self._share = share + (accelerator.process_index < rest)
        self._update: OpenRecord | None = None
        self._evaluation: OpenRecord | None = None
        self._start, self._first_step = 0, None
        self._warned = False
        if episodes:
            host.add_callback(self)

    def _pieces(self, ids: list[int]) -> list[str]:
        tokenizer = self._host.internals.tokenizer
        whole = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return cut(ids, partial(tokenizer.decode, **whole), backend)

    # ------------------------------------------------------------------ called by training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Number this training in the trace, so that readers discard older records of later steps."""
        start = 0
        if self._host.accelerator.is_main_process:
            with self._harmless():
                start = next_start(self._folder())
        self._start = gather_object([start])[0]
        self._first_step = self._host.state.global_step

    def rollout(self, rollout: Rollout, batch: Batch) -> None:
        """Begin the record of a training rollout, and number the rows of its batch."""
        host = self._host
        if not self._share:
            return
        self._update = None
        with self._harmless():
            update = host.state.global_step // host.args.steps_per_rollout + 1
            numbers = range(len(rollout.episodes))[: self._share]
            records = begin_records(host, rollout, numbers, self._player.engine)
            # The first rows of the batch are the contexts of the first episodes.
            columns: dict[str, Any] = dict(batch)
            names = (*COLUMNS, *OF_CRITIC) if host.has_critic else COLUMNS
            kept = {n: columns[n][: len(records)].clone() for n in names if n in columns}
            self._update = OpenRecord(self._header("train", "train", update), records, kept)
            ids = batch["completion_ids"]
            batch["trace_row"] = torch.arange(len(ids), device=ids.device)

    def observe(
        self, inputs: Batch, logprobs: Tensor, log_ratio: Tensor, surrogate: ClippedSurrogate
    ) -> None:
        """Record a micro-batch's pass through the policy."""
        if self._update is None or "trace_row" not in inputs:
            return
        # The record is lost if this fails.
        record, self._update = self._update, None
        with self._harmless():
            figures = {"logprobs": logprobs, "log_ratio": log_ratio}
            figures |= {"clipped": surrogate.is_clipped, "seen": inputs["loss_mask"]}
            if surrogate.episode_weights is not None:
                figures["weight"] = surrogate.episode_weights[:, None].expand_as(logprobs)
            # The last row of the tables takes the values of rows that are not recorded.
            size, length = len(record.episodes), record.batch["turn_index"].size(1)
            rows = inputs["trace_row"].clamp(max=size)
            for name, values in figures.items():
                if name not in record.passes:
                    record.passes[name] = values.new_zeros(size + 1, length)
                table = record.passes[name]
                table[rows, : values.size(1)] = values.detach().to(table.dtype)
            self._update = record

    def end_mini_batch(self, window: list[Batch], *, verdict: str) -> None:
        """Record the guards' verdict on an optimizer step; write the update after its last step."""
        if self._update is None:
            return
        host = self._host
        with self._harmless():
            outcome = verdict
            if verdict == "taken" and is_warming_up(host):
                outcome = "critic_only"
            self._update.header["clip_range"] = [host.epsilon_low, host.epsilon_high]
            steps = self._update.header["steps"]
            steps[outcome] = steps.get(outcome, 0) + 1
            rows = [part["trace_row"] for part in window if "trace_row" in part]
            if rows:
                self._update.outcomes.append((outcome, torch.cat(rows)))
        if host.internals.step % host.args.micro_batches_per_rollout == 0:
            self._update.header["complete"] = True
            self.finish()

    def finish(self) -> None:
        """Write the open update's record, if there is one."""
        record, self._update = self._update, None
        self._write(record)

    def evaluated(self, rollout: Rollout, prefix: str) -> None:
        """Record episodes of an evaluation batch, until this process has recorded its share."""
        if not self._share:
            return
        with self._harmless():
            if self._evaluation is None:
                done = self._host.state.global_step // self._host.args.steps_per_rollout
                self._evaluation = OpenRecord(self._header("eval", prefix, done))
            room = self._share - len(self._evaluation.episodes)
            numbers = [n for n in range(len(rollout.episodes)) if n not in rollout.repeated][:room]
            records = begin_records(self._host, rollout, numbers, self._player.eval_engine)
            self._evaluation.episodes += complete_records(records, {}, {}, self._pieces)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the record of a completed evaluation or prediction."""
        record, self._evaluation = self._evaluation, None
        self._write(record)

    on_predict = on_evaluate

    def state_dict(self) -> dict[str, Any] | None:
        """Return the open update's record for a checkpoint, or None between two updates."""
        return None if self._update is None else dict(vars(self._update))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the open update's record from a checkpoint."""
        if state is None or not self._share:
            self._update = None
            return
        self._update = OpenRecord(**send_to_device(state, self._host.accelerator.device))

    # -------------------------------------------------------------------------- inside

    def _header(self, phase: str, name: str, update: int) -> dict[str, Any]:
        host = self._host
        return {
            "phase": phase,
            "name": name,
            "update": update,
            "global_step": host.state.global_step,
            "process": host.accelerator.process_index,
            "trainer": host.internals.method,
            "variant": getattr(host.args, "variant", None),
            "level": host.importance_sampling_level,
            "steps": {},
            "complete": phase == "eval",
        }

    def _write(self, record: OpenRecord | None) -> None:
        if record is None or not record.episodes:
            return
        with self._harmless():
            episodes = record.episodes
            if record.header["phase"] == "train":
                complete_records(episodes, record.batch, record.passes, self._pieces)
                outcomes = [(name, rows.tolist()) for name, rows in record.outcomes]
                for row, episode in enumerate(episodes):
                    episode["steps"] = Counter(name for name, rows in outcomes if row in rows)
            start = {"start": self._start, "first_step": self._first_step}
            about = {**record.header, **start, "episodes": len(episodes)}
            write_update(self._folder(), TracedUpdate.from_json(about), episodes)

    def _folder(self) -> Path:
        return Path(self._host.args.output_dir) / FOLDER

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Context manager that turns exceptions into a warning: a failed record does not end the run."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "The episodes of step %d were not recorded: %s: %s. Training goes on.",
                    self._host.state.global_step, type(error).__name__, error,
                )  # fmt: skip
            logger.debug("recording failed", exc_info=True)
            self._warned = True
