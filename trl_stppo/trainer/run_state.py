"""What a run holds besides weights and optimizers, as plain data, and which runs may go on with it.

Upstream's checkpoints leave out where the rollout buffer stands: a run resumed in the middle of a block
would play new episodes and stay out of step. Here each process writes its buffer (log-probabilities,
values and advantages included), the sampler's position and the figures that were not logged yet.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..hub.pushing import EPISODES
from . import checkpoint_files
from .describe import describe
from .engines import engine_name, is_sharded
from .reporting import names_runs

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)

# Must be equal: the data would be other data, or weights and moments would not fit.
FIXED = (
    *("trainer", "variant", "critic", "adapter", "engine", "rows", "seed", "shuffle"),
    *("batch", "episodes_per_prompt", "epochs", "mini_batches"),
)
# May differ only where a rollout begins: the buffer is cut for so many processes and micro-batches.
CUT = ("processes", "micro_batches")


def plain(value: Any) -> Any:
    """Data that can be read back without running code: tensors, numbers, text, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # a view would drag its whole storage along
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "appendleft"):
        return [plain(item) for item in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def state_file(folder: Path, process: int) -> Path:
    """Where a process keeps its state."""
    return folder / f"run_state_{process}.pt"


def episodes_file(folder: Path, process: int) -> Path:
    """Where it keeps what its newest episodes have said; on this disk alone, see `hub.pushing`."""
    return folder / EPISODES.replace("*", str(process))


def loaded(path: Path) -> Any:
    """Plain data and tensors, from a file of a checkpoint."""
    return torch.load(path, map_location="cpu", weights_only=True)


def collect_episodes(trainer: PPOTrainer) -> dict[str, Any]:
    """Texts that the log shows, and the update that is being recorded; no weight depends on them."""
    logs = {key: value for key, value in trainer._logs.items() if key != "images"}
    return {"logs": plain(logs), "trace": plain(trainer._trace.state_dict())}


def load_episodes(folder: Path, process: int) -> dict[str, Any]:
    """What `collect_episodes` took; nothing where it is not there or damaged, as no weight needs it."""
    path = episodes_file(folder, process)
    if not path.is_file():
        return {}
    try:
        state: dict[str, Any] = loaded(path)
    except Exception as error:  # of several kinds, for a file that is cut off
        logger.warning(
            "`%s` cannot be read (%s: %s). The run goes on without it: texts that were not logged yet and "
            "what was recorded of an open update are lost, and nothing else.",
            path, type(error).__name__, error,
        )  # fmt: skip
        return {}
    return state


def restore_episodes(trainer: PPOTrainer, state: dict[str, Any]) -> None:
    """Put back what `load_episodes` found; nothing in a checkpoint that came from the Hub."""
    for key, entries in state.get("logs", {}).items():
        if isinstance(entries, dict):
            for name, values in entries.items():
                trainer._logs[key][name].extend(values)
        else:
            trainer._logs[key].extend(entries)
    trainer._trace.load_state_dict(state.get("trace"))


def collect(trainer: PPOTrainer, data: dict[str, Any]) -> dict[str, Any]:
    """The state of this process between two optimizer steps; `data` says where in the rows it is."""
    state = {
        "buffer": trainer._buffered_inputs if _inside_rollout(trainer) else None,
        "metrics": trainer._metrics,
        "loss": trainer._tr_loss,
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        **data,
        "guards": trainer._guards.state_dict(),
    }
    return {key: plain(value) for key, value in state.items()}


def restore(trainer: PPOTrainer, state: dict[str, Any]) -> None:
    """Put back what `collect` took, except the place in the rows."""
    device = trainer.accelerator.device
    trainer._step = trainer.state.global_step * trainer.args.gradient_accumulation_steps
    buffer = state["buffer"]
    trainer._buffered_inputs = None if buffer is None else [_to(part, device) for part in buffer]
    for mode, figures in state["metrics"].items():
        trainer._metrics[mode].update(figures)
    trainer._tr_loss = state["loss"].to(device)
    trainer._total_loss_scalar = state["total_loss"]
    trainer._globalstep_last_logged = state["last_logged"]
    trainer._guards.load_state_dict(state["guards"])


def _to(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}


# -------------------------------------------------------------------- which runs


def name_to_report(trainer: PPOTrainer) -> str:
    """The run's name; before the training, that of the run which its settings say will go on."""
    wanted = trainer.args.resume_from_checkpoint
    if wanted and not trainer._has_trained and names_runs(trainer.args):
        with suppress(CheckpointError):  # `train` will say what is wrong
            folder = checkpoint_files.to_resume(Path(trainer.args.output_dir), wanted)
            if folder is not None:
                return str(checkpoint_files.read_manifest(folder).get("run") or trainer._run_name)
    return trainer._run_name


def about(trainer: PPOTrainer) -> dict[str, Any]:
    """What the manifest says of the run: its identity, its cut into batches, its settings."""
    args, accelerator, run = (
        trainer.args,
        trainer.accelerator,
        describe(trainer, trainer._rollout_plan),
    )
    micro_batches = args.steps_per_generation
    assert micro_batches is not None  # GRPOConfig has filled it in
    return {
        "run": trainer._run_name,
        "global_step": trainer.state.global_step,
        "inside_rollout": _inside_rollout(trainer),
        "resumable": not args.save_only_model,
        "identity": {
            "trainer": type(trainer).config_class.__name__,
            "variant": run.variant,
            "critic": run.critic,
            "adapter": run.adapter,
            "engine": engine_name(accelerator) if is_sharded(accelerator) else None,
            "rows": run.rows,
            "seed": args.seed,
            "shuffle": bool(args.shuffle_dataset),
            "batch": args.generation_batch_size,
            "episodes_per_prompt": trainer.num_generations,
            "epochs": trainer.num_iterations,
            "mini_batches": micro_batches // args.gradient_accumulation_steps,
        },
        "cut": {
            "processes": accelerator.num_processes,
            "micro_batches": micro_batches,
        },
        "settings": run.settings,
    }


def _inside_rollout(trainer: PPOTrainer) -> bool:
    """Whether the rollout batch in the buffer still has updates to give."""
    return trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0


def check_same_run(folder: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Refuse a checkpoint that this trainer could not go on from; say how its batches are cut anew.

    Raises:
        CheckpointError: names the field, both values, and what to do.
    """
    if not saved["resumable"]:
        raise CheckpointError(
            f"`{folder}` was written with save_only_model=True and has no optimizer state. Start a new "
            f"run from its policy (model={str(folder)!r}), or save with save_only_model=False."
        )
    for field in FIXED:
        was, now = saved["identity"].get(field), present["identity"][field]
        if was != now:
            raise CheckpointError(
                f"`{folder}` comes from a run with {field}={was!r}; this one has {field}={now!r}. Resume "
                f"with what it was saved with, or start a new run from its policy alone "
                f"(model={str(folder)!r}, without resume_from_checkpoint)."
            )
    trained_by = saved["identity"].get("engine") or ""
    for field in CUT:
        was, now = saved["cut"].get(field), present["cut"][field]
        if was != now and field == "processes" and trained_by.startswith("ZeRO"):
            raise CheckpointError(
                f"`{folder}` was saved by {was} processes; this run has {now}. {trained_by} keeps its "
                f"optimizer's state in as many pieces. Resume with {was} processes, or start a new run "
                f"from the policy alone."
            )
        if was != now and saved["inside_rollout"]:
            raise CheckpointError(
                f"`{folder}` was saved in the middle of a rollout batch with {field}={was!r}; this run "
                f"has {field}={now!r} and cannot share it out in the same way. Resume with {field}="
                f"{was!r}, or from a checkpoint at the end of a rollout batch."
            )
        if was != now:
            logger.warning(
                "%s: %s was %r and is %r now. The run goes on with a new rollout batch; it will not "
                "equal the uninterrupted run bit for bit.",
                folder, field, was, now,
            )  # fmt: skip
