"""Trainings on two processes where something happens to one of them alone; each rank saves its view.

Started by `test_signals.py` through torch.distributed.run.
"""

import functools
import math
import os
import signal
from pathlib import Path
from typing import Any

from tests.kit.builders import at_step
from tests.kit.launch import save_cases
from tests.kit.scripted import EPISODES, LEARNS, Float64Trainer, logged, scripted_trainer
from trl_stppo.errors import NonFiniteError, RunLockError
from trl_stppo.trainer import disk

RUN = {
    **LEARNS, "trainer_class": Float64Trainer, "per_device_train_batch_size": EPISODES // 2,
    "max_steps": 4, "ddp_backend": "gloo",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "loss of rank 1": {},
    "critic of rank 1": {},
    "signal to rank 1": {},
    "signal to rank 1 in a rollout": {},
    "signal to rank 1 at an update's end": {},
    "rank 0 never finite": {},
    "the folder of another run": {},
}  # fmt: skip
AT = 2


def arrange(case: str, trainer: Any) -> None:
    """Make the case happen on the process that it names."""
    rank = trainer.accelerator.process_index

    def nan_at_its_step() -> float:
        return math.nan if trainer.state.global_step + 1 == AT else 1.0

    if case == "loss of rank 1" and rank == 1:
        loss = trainer._compute_loss
        trainer._compute_loss = lambda m, i: loss(m, i) * nan_at_its_step()
    elif case == "critic of rank 1" and rank == 1:
        add = trainer._optimizer_step.critic_grads.add
        trainer._optimizer_step.critic_grads.add = lambda value: add(value * nan_at_its_step())
    elif case.startswith("signal to rank 1") and rank == 1:
        kill = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
        # An update has two steps.
        event, step = "on_step_begin", AT - 1 + ("rollout" in case)
        if "end" in case:
            event = "on_optimizer_step"
        trainer.add_callback(at_step(event, step, kill))
    elif case == "rank 0 never finite" and rank == 0:
        loss = trainer._compute_loss
        trainer._compute_loss = lambda m, i: loss(m, i) * math.nan
    elif case == "the folder of another run" and rank == 0:
        trainer.other_run = disk.RunLock(Path(trainer.args.output_dir))
        trainer.other_run.take()


def run(case: str, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    trainer, recorder = scripted_trainer(folder, **{**RUN, **CASES[case]})
    assert trainer.accelerator.num_processes == 2
    arrange(case, trainer)
    error, what, count = None, [], trainer._guards._count_skip
    trainer._guards._count_skip = lambda faults: what.append(faults) or count(faults)
    try:
        trainer.train()
    except (NonFiniteError, RunLockError) as caught:
        error = str(caught)
    return {
        "weights": [recorder.before, *recorder.after],
        "skipped_steps": logged(trainer, "guard/skipped_steps"),
        "what": what[0] if what else None,
        "stop_reason": trainer.stop_reason,
        "stop_signal": trainer.stop_signal,
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint-*")),
        "error": error,
    }


if __name__ == "__main__":
    save_cases(run)
