"""What happens in the middle of a training of `engine_run`."""

import math
import os
from typing import Any

from transformers import TrainerCallback

from trl_stppo import STPPOTrainer


class Event(TrainerCallback):
    """Has the second step left out."""

    def __init__(self, name: str) -> None:
        self.trainer: STPPOTrainer | None = None
        self.name, self.vf_coef = name, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and self.name == "rests":  # until the next rollout
            self.trainer._guards._state.rollout_stopped = True
        if state.global_step == 1 and self.name == "not finite" and os.environ["RANK"] == "1":
            self.vf_coef, args.vf_coef = args.vf_coef, math.nan

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if math.isnan(args.vf_coef):
            args.vf_coef = self.vf_coef
