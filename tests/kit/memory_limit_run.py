"""A run whose memory is limited from step 2 on: `python -m tests.kit.memory_limit_run <folder> <hook> <MiB>`.

`<hook>` is on_step_end, right before a checkpoint, or on_step_begin, right before a rollout.
"""

import resource
import sys
from pathlib import Path

from transformers import TrainerCallback

from tests.kit.builders import LIMITS, TEXT, build
from trl_stppo import threads


def main(folder: str, hook: str, room: str) -> None:
    threads.START_SECONDS = 5.0

    def limit(self, args, state, control, **kwargs):
        if state.global_step == 2:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + (int(room) << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    callback = type("Limit", (TrainerCallback,), {hook: limit})()
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **LIMITS}
    build(folder, arguments={**TEXT, "callbacks": [callback]}, **options).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
