"""Records a few episodes of every update, with the update's values for each of their tokens.

The first rows of a process's rollout batch are recorded. Mini-batches are shuffled in every epoch, so
each row has its number as a column; the passes of the update store values by that number in tables on
the device, which are copied to the host once, when the update is over. Recording draws no random
numbers, does not change training's computation, and a failure in it does not end the training.
"""

from __future__ import annotations

import logging
import time
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
from ...rollout.engine import RolloutEngine
from ...trace.files import FOLDER, next_start, write_update
from ...trace.format import TracedUpdate
from ...trace.pieces import cut
from ..batch import Batch
from ..bridge import Bridge, is_warming_up
from ..loop.player import EpisodePlayer
from ..loop.rollout import Rollout
from .facts import facts
from .lines import lines

logger = logging.getLogger(__name__)

# Columns of the rollout batch, [B, T].
COLUMNS = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "turn_index", "loss_mask"),
    *("value_mask", "advantages", "values", "returns", "old_per_token_logps"),
)
# Metrics of the batch that are recorded with its episodes.
PLAYED = ("episode/success_rate", "episode/score", "turns/mean", "value/explained_variance")
TRAINED = (
    *("policy/clip_fraction", "policy/ratio_max", "policy/approx_kl", "policy/entropy"),
    *("clip_bias/norm", "clip_bias/scale"),
)


@dataclass
class OpenRecord:
    """Unfinished record of a rollout batch and its update, or of an evaluation."""

    header: dict[str, Any]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    batch: dict[str, Tensor] = field(default_factory=dict)
    passes: dict[str, Tensor] = field(default_factory=dict)
    outcomes: list[tuple[str, Tensor]] = field(default_factory=list)

    def observe(self, rows: Tensor, figures: dict[str, Tensor]) -> None:
        """Store a micro-batch's values, [b, t] each, at the recorded rows."""
        size = len(self.episodes)
        slots = rows.clamp(max=size)
        for name, values in figures.items():
            if name not in self.passes:
                length = self.batch["completion_ids"].size(1)
                self.passes[name] = values.new_zeros(size + 1, length)
            kept = self.passes[name]
            kept[slots, : values.size(1)] = values.detach().to(kept.dtype)

    def outcomes_of_rows(self) -> list[Counter[str]]:
        """Count for each recorded row its optimizer steps by verdict."""
        counts = [Counter[str]() for _ in self.episodes]
        if self.outcomes:
            rows = torch.cat([rows for _, rows in self.outcomes]).tolist()
            names = [name for name, rows in self.outcomes for _ in range(len(rows))]
            for row, name in zip(rows, names, strict=True):
                if row < len(counts):
                    counts[row][name] += 1
        return counts


class TraceRecorder(TrainerCallback):
    """Records this process's share of the `trace_episodes` episodes of each update."""

    def __init__(self, host: Bridge, player: EpisodePlayer) -> None:
        self._host, self._player = host, player
        accelerator, episodes = host.accelerator, host.args.trace_episodes
        share, rest = divmod(episodes, accelerator.num_processes)
        self._share = share + (accelerator.process_index < rest)
        self._update: OpenRecord | None = None
        self._evaluation: OpenRecord | None = None
        self._start, self._started, self._first_step = 0, time.time(), None
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
        self._start, self._started = gather_object([(start, time.time())])[0]
        self._first_step = self._host.state.global_step

    def rollout(self, rollout: Rollout, batch: Batch) -> None:
        """Begin the record of a training rollout, and number the rows of its batch."""
        host = self._host
        if not self._share:
            return
        self._update = None
        with self._harmless():
            update = host.state.global_step // host.args.steps_per_rollout + 1
            numbers = list(range(len(rollout.episodes)))[: self._share]
            engine = self._player.engine
            episodes, kept = self._episodes(rollout, batch, numbers, engine)
            self._update = OpenRecord(self._header("train", "train", update), episodes, kept)
            self._add_figures(PLAYED)
            ids = batch["completion_ids"]
            batch["trace_row"] = torch.arange(len(ids), device=ids.device)

    def observe(
        self, inputs: Batch, logprobs: Tensor, log_ratio: Tensor, surrogate: ClippedSurrogate
    ) -> None:
        """Record a micro-batch's pass through the policy."""
        if self._update is None or "trace_row" not in inputs:
            return
        record, self._update = self._update, None  # lost if this fails
        with self._harmless():
            figures = {"logprobs": logprobs, "log_ratio": log_ratio}
            figures |= {"clipped": surrogate.is_clipped, "seen": inputs["loss_mask"]}
            if surrogate.episode_weights is not None:
                figures["weight"] = surrogate.episode_weights[:, None].expand_as(logprobs)
            record.observe(inputs["trace_row"], figures)
            self._update = record

    def end_mini_batch(self, window: list[Batch], *, verdict: str) -> None:
        """Record the guards' verdict on an optimizer step; write the update after its last step."""
        if self._update is None:
            return
        host = self._host
        with self._harmless():
            outcome = verdict
            if verdict == "taken" and is_warming_up(self._host):
                outcome = "critic_only"
            self._update.header["clip_range"] = [host.epsilon_low, host.epsilon_high]
            steps = self._update.header["steps"]
            steps[outcome] = steps.get(outcome, 0) + 1
            rows = [part["trace_row"] for part in window if "trace_row" in part]
            if rows:
                self._update.outcomes.append((outcome, torch.cat(rows)))
            self._add_figures(TRAINED)
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
            if numbers:
                engine = self._player.eval_engine
                episodes, kept = self._episodes(rollout, self._player.pad(rollout), numbers, engine)
                self._evaluation.episodes += lines(episodes, kept, {}, self._pieces)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Write the record of a completed evaluation, with its metrics."""
        record, self._evaluation = self._evaluation, None
        if record is not None and metrics is not None:
            for name in PLAYED:
                value = metrics.get(f"{record.header['name']}_{name}")
                if value is not None:
                    record.header["figures"][name] = float(value)
        self._write(record)

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Write the record of a completed prediction, without metrics."""
        self.on_evaluate(args, state, control)

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
        host, process = self._host, self._host.accelerator
        return {
            "phase": phase,
            "name": name,
            "update": update,
            "global_step": host.state.global_step,
            "process": process.process_index,
            "processes": process.num_processes,
            "trainer": self._host.internals.method,
            "variant": getattr(host.args, "variant", None),
            "level": host.importance_sampling_level,
            "steps": {},
            "complete": phase == "eval",
            "figures": {},
        }

    def _add_figures(self, names: tuple[str, ...]) -> None:
        """Add the newest logged value of each metric to the record's header."""
        assert self._update is not None
        for name in names:
            values = self._host.internals.metrics["train"].get(name)
            if values:
                self._update.header["figures"][name] = float(values[-1])

    def _episodes(
        self, rollout: Rollout, batch: Batch, numbers: list[int], engine: RolloutEngine
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Return plain data of the contexts of the episodes `numbers`, and copies of their tensors."""
        host, ids = self._host, batch["completion_ids"]
        rows = [row for row, (number, _) in enumerate(rollout.contexts) if number in numbers]
        index = torch.tensor(rows, dtype=torch.long, device=ids.device)
        whole: dict[str, Any] = dict(batch)
        tensors = {name: whole[name][index] for name in COLUMNS if name in whole}
        if not host.has_critic:
            critics = ("values", "returns", "value_mask")
            tensors = {name: tensor for name, tensor in tensors.items() if name not in critics}
        first = host.accelerator.process_index * len(rollout.episodes)
        return facts(rollout, numbers, first, host.reward_func_names, engine), tensors

    def _write(self, record: OpenRecord | None) -> None:
        if record is None or not record.episodes:
            return
        with self._harmless():
            episodes = record.episodes
            if record.header["phase"] == "train":
                episodes = lines(episodes, record.batch, record.passes, self._pieces)
                for episode, counts in zip(episodes, record.outcomes_of_rows(), strict=True):
                    episode["steps"] = dict(counts)
            start = {"start": self._start, "started": self._started, "first_step": self._first_step}
            about = {**record.header, **start, "episodes": len(episodes)}
            update = TracedUpdate.from_json(about)
            write_update(self._folder(), update, episodes)

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
