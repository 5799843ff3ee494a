"""Trainings on two processes of which one alone fails or has nothing to learn from.

Started by `test_outages.py` through torch.distributed.run; each rank saves what
it has seen.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.kit.launch import save_cases
from tests.kit.outages import BATCH, build, saved
from tests.kit.scripted import logged, weights
from trl_stppo.errors import EnvironmentFailureError, NonFiniteError, RolloutError
from trl_stppo.rollout import engine

OPTIONS: dict[str, Any] = {"rows": 4 * BATCH, "ddp_backend": "gloo", "max_steps": 12}
CASES: dict[str, dict[str, Any]] = {
    "all of rank 1 fail at once": {}, "all of rank 1 fail, too many": {},
    "all of rank 1 fail, allowed": {}, "rank 1 has nothing to learn from": {"max_steps": 4},
    "nobody has anything to learn from": {"max_steps": 4}, "weights of rank 1": {},
    "an error of rank 1 alone": {},
}  # fmt: skip


class Watches(TrainerCallback):
    """Keeps the weights after each step; spoils them where that is asked for."""

    spoils = False

    def __init__(self) -> None:
        self.after: list[Any] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.spoils and state.global_step == 2:
            next(self.trainer.model.parameters()).data[0, 0] = float("nan")
        self.after.append(weights(self.trainer))


def run(case: str, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    rank = int(os.environ["RANK"])
    fails = case.startswith("all of rank 1") and rank == 1
    since = 4 if case.endswith("at once") else 0
    engine.MAX_FAILURES_IN_A_ROW = BATCH if case.endswith("at once") else 99
    watches = Watches()
    trainer = build(
        folder,
        lambda trainer, n: (
            (fails and trainer.state.global_step >= since) or (case.endswith("too many") and n % BATCH == 0)
        ),
        arguments={"callbacks": [watches]},
        **{**OPTIONS, **CASES[case]},
    )
    watches.trainer, watches.spoils = trainer, case.startswith("weights") and rank == 1
    if "to learn from" in case and (rank == 1 or case.startswith("nobody")):
        original = trainer._rewards.score

        def score(*args: Any) -> Any:
            scored = original(*args)
            return replace(scored, counts=scored.counts & (trainer.state.global_step != 2))

        trainer._rewards.score = score
    if case == "an error of rank 1 alone" and rank == 1:
        play = trainer._player.engine.run

        def raising(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == 4:
                raise ValueError("no rows")
            return play(*args, **kwargs)

        trainer._player.engine.run = raising
    error = None
    try:
        trainer.train()
    except (EnvironmentFailureError, NonFiniteError, RolloutError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "error": error, "steps": trainer.state.global_step, "checkpoints": saved(folder),
        "empty": logged(trainer, "guard/empty_steps"), "after": watches.after,
    }  # fmt: skip


if __name__ == "__main__":
    save_cases(run)
