"""One scripted training whose processes record together; see trace/test_trace_recording.py."""

import os
import sys
from pathlib import Path

import torch

from tests.kit.scripted import EPISODES, train


def run(folder: Path, processes: int) -> int:
    """Two epochs of one mini-batch; returns the steps taken."""
    options = {"ddp_backend": "gloo"} if processes > 1 else {}
    trainer, _ = train(
        folder, variant="st-ppo", per_device_train_batch_size=EPISODES // processes,
        num_ppo_epochs=2, max_steps=2, trace_episodes=5, **options,
    )  # fmt: skip
    return trainer.state.global_step


def main() -> None:
    folder = Path(sys.argv[1])
    steps = run(folder / "two", int(os.environ["WORLD_SIZE"]))
    torch.save({"steps": steps}, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
