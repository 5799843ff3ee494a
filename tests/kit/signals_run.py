"""A training that an outside process interrupts. Started by `test_signals.py`."""

import sys
from typing import Any

from transformers import TrainerCallback

from tests.kit.scripted import LEARNS, Float64Trainer, scripted_trainer

RUN = {**LEARNS, "trainer_class": Float64Trainer, "num_ppo_epochs": 3, "max_steps": 7}


class Waiting(TrainerCallback):
    """Says when a step begins; in the second one it waits for a line, before which a signal was sent."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"BEGIN {state.global_step + 1}", flush=True)
        if state.global_step == 1:
            sys.stdin.readline()


def main() -> None:
    trainer, _ = scripted_trainer(sys.argv[1], callbacks=[Waiting()], **RUN)
    trainer.train()
    print(f"RETURNED {trainer.state.global_step} {trainer.stop_signal}", flush=True)


if __name__ == "__main__":
    main()
