"""Saving and resuming: checkpoints that hold a run's complete state and are written atomically."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as upstreams

from ...errors import CheckpointError, CheckpointWriteError
from .. import disk
from .._trl import replaced
from ..bridge import Wrapped
from ..describe import algorithm_settings
from ..disk import RunLock
from ..engine import engine_of
from ..guards.endings import Ending
from ..guards.steps import Guards
from ..ppo_config import PPOConfig
from .reference import Marks, check_reference
from .run_state import RunState

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def check_same_run(folder: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Refuse a checkpoint that cannot be resumed from; warn if its batches will be split differently."""
    if not saved["resumable"]:
        raise CheckpointError(f"`{folder}` was written with save_only_model=True and has no optimizer state.")
    for field, now in present["identity"].items():
        was = saved["identity"].get(field)
        if was != now:
            raise CheckpointError(
                f"`{folder}` comes from a run with {field}={was!r}; this one has {field}={now!r}."
            )
    check_reference(folder, saved.get("reference"), present["reference"])
    if (was := saved.get("processor")) != (now := present["processor"]):
        logger.warning(
            "%s: its policy learned from pixels of the processor %s; now they come from %s.",
            folder,
            was,
            now,
        )
    trained_by = saved["identity"].get("engine") or ""
    for field, now in present["split"].items():
        was = saved["split"].get(field)
        if was != now and field == "processes" and trained_by.startswith("ZeRO"):
            raise CheckpointError(
                f"`{folder}` comes from {was} processes; this run has {now}, and {trained_by} needs as many."
            )
        if was != now:
            logger.warning(
                "%s: %s was %r and is %r now, so the run will not equal the uninterrupted one bit for bit.",
                folder, field, was, now,
            )  # fmt: skip


def done_by(here: bool, call: Callable[[], Result]) -> list[Result]:
    """Call a function on some processes; return its results, or raise its exception, on all processes."""
    result, error = [], None
    try:
        if here:
            result.append(call())
    except Exception as raised:
        error = raised
    failure = None if error is None else (type(error), str(error))
    ends = gather_object([(result, failure)])
    if error is not None:
        raise error
    for _, theirs in ends:
        if theirs is not None:
            raise theirs[0](theirs[1])
    return [one for results, _ in ends for one in results]


@contextmanager
def _without_bars() -> Iterator[None]:
    """Context manager without upstream's progress bars, because the first bar would start a thread."""
    shown = upstreams.is_progress_bar_enabled()
    upstreams.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            upstreams.enable_progress_bar()


class Checkpoints:
    """Writes, finds and deletes the checkpoints of one trainer.

    Methods with a `wrapped` argument wrap upstream's method of the same purpose; its arguments follow.
    `identity` names trainer, critic and adapter; a checkpoint with others, or of a run with another
    `reference` policy, is refused.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Accelerator,
        rows: Any,
        state: RunState,
        guards: Guards,
        ending: Ending,
        reference: Marks | None,
        processor: dict[str, str] | None,
        **identity: object,
    ) -> None:
        self._args, self._accelerator, self._rows = args, accelerator, rows
        self._identity, self._reference, self._processor = identity, reference, processor
        self._state, self._guards, self._ending = state, guards, ending
        self._is_stream = not hasattr(rows, "__len__")
        self.staging: Path | None = None

    def train(self, wrapped: Wrapped, wanted: str | bool | None, *args: object, **kwargs: object) -> Any:
        """Implement `AgentTrainer.train`: find the checkpoint to resume from, and run upstream's `train`."""
        folder, run_dir = None, Path(self._args.output_dir)
        accelerator, lock = self._accelerator, RunLock(run_dir)
        with ExitStack() as stack:
            stack.callback(lock.release)
            done_by(accelerator.is_main_process, lock.take)
            # Files of settings and flags give texts.
            wanted = {"true": True, "false": False}.get(str(wanted).lower(), wanted)
            if wanted:
                done_by(accelerator.is_local_main_process, partial(disk.tidy, run_dir))
                find = partial(disk.to_resume, run_dir, wanted)
                (folder,) = done_by(accelerator.is_main_process, find)
            if folder is not None:
                check_same_run(folder, disk.read_manifest(folder), self._about(0))
            self._ending.last_checkpoint = folder
            self._state.read(folder)
            stack.enter_context(self._guards.watching())
            output = wrapped(None if folder is None else str(folder), *args, **kwargs)
            if self._ending.unsaved:
                self._ending.check_weights()
        # Upstream's own value divides the whole run's loss by the steps of this part, so use the logged loss.
        return TrainOutput(output.global_step, output.metrics["train_loss"], output.metrics)

    def _about(self, step: int) -> dict[str, Any]:
        """Return a record of the run for the manifest: identity, split into batches, settings."""
        args, accelerator = self._args, self._accelerator
        micro_batches = args.steps_per_generation
        assert micro_batches is not None
        return {
            "global_step": step,
            "resumable": not args.save_only_model,
            # These must be equal. Otherwise the data differ, or weights and moments do not fit.
            "identity": {
                **self._identity,
                "variant": getattr(args, "variant", None),
                "engine": engine_of(accelerator).identity,
                "rows": None if self._is_stream else len(self._rows),
                "seed": args.seed,
                "shuffle": bool(args.shuffle_dataset),
                "batch": args.generation_batch_size,
                "episodes_per_prompt": args.num_generations,
                "epochs": args.num_iterations,
                "mini_batches": micro_batches // args.gradient_accumulation_steps,
            },
            "reference": self._reference,
            "processor": self._processor,
            # A resumed run may change these, with a warning: sums are then rounded in another order.
            "split": {"processes": accelerator.num_processes, "micro_batches": micro_batches},
            "settings": algorithm_settings(args),
        }

    def begin(
        self, where: tuple[int, int], state: TrainerState, max_steps: int, epochs: int
    ) -> tuple[int, int]:
        """Return the epoch and the batch to start from; `where` is upstream's answer."""
        self._find_best(Path(self._args.output_dir), state)
        # The run is complete, but upstream would take one more step.
        if state.global_step >= max_steps:
            return epochs, 0
        if self._state.folder is None or not self._is_stream or self._args.ignore_data_skip:
            return where
        # Upstream treats a stream as one endless pass, so take the position from the run's state.
        return self._state.place_in_stream()

    def _find_best(self, run_dir: Path, state: TrainerState) -> None:
        """Update the best checkpoint's path if the run's folder has moved."""
        best = state.best_global_step
        path = run_dir / f"checkpoint-{best}"
        if best and (best == state.global_step or path.is_dir()):
            state.best_model_checkpoint = str(path)

    def save(
        self, wrapped: Wrapped, run_dir: Path, state: TrainerState, model: nn.Module, trial: object
    ) -> Path:
        """Write a checkpoint with the run's state in a staging folder, then rename the folder."""
        self._ending.check_weights()
        accelerator, step = self._accelerator, state.global_step
        staging, name = run_dir / disk.STAGING, f"checkpoint-{step}"
        final = run_dir / name
        if accelerator.is_local_main_process:
            disk.remove(staging)
        accelerator.wait_for_everyone()
        try:
            with replaced(self, staging=staging), _without_bars():
                wrapped(model, trial)
            self._find_best(run_dir, state)
            self._state.write(staging / name)
            accelerator.wait_for_everyone()
            if self._args.should_save:
                order = disk.next_order(run_dir)
                disk.seal(staging / name, {**self._about(step), "order": order})
        except Exception as error:
            disk.remove(staging)
            raise CheckpointWriteError(
                f"The checkpoint of step {step} could not be written to `{run_dir}`: "
                f"{type(error).__name__}: {error}. The newest complete checkpoint is "
                f"{self._ending.last_checkpoint or 'none'}."
            ) from error
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and (staging / name).is_dir():
            disk.publish(staging / name, final)
        self._ending.last_checkpoint = final
        accelerator.wait_for_everyone()
        return final

    def prune(self, run_dir: Path, best: str | None, kept: Collection[Path] = ()) -> None:
        """Delete the oldest checkpoints beyond `save_total_limit`, except the newest, `best` and `kept`."""
        if self._args.should_save:
            disk.prune(run_dir, self._args.save_total_limit, best, kept)

    def finish(self, wrapped: Wrapped, *args: object) -> Any:
        """End a training as upstream does, but keep the last checkpoint, which a resumed run needs.

        With a limit of one, upstream keeps only the best checkpoint.
        """
        with replaced(self._args, save_total_limit=None):
            return wrapped(*args)
