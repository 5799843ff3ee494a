"""An agent that walks to a door, as a user of TRL 1.16 writes it: everything in one call."""

import random

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RichProgressCallback

PROMPT = "You are in a corridor. Use the tool `move` with left or right until you stand at the door."


class CorridorEnv:
    """Five fields, the door at one of them."""

    def reset(self, **kwargs) -> str | None:
        """Stand in the middle."""
        self.place, self.door = 2, random.choice([0, 4])
        self.done = False
        return f"The door is at {self.door}."

    def move(self, direction: str) -> str:
        """
        Go one field.

        Args:
            direction: Either "left" or "right".

        Returns:
            Where you are now.
        """
        if self.done:
            raise ValueError("Game over.")
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}.")
        self.place += 1 if direction == "right" else -1
        self.done = self.place in (0, 4)
        return f"You are at {self.place}."


def reached(environments, **kwargs) -> list[float]:
    """1 at the door."""
    return [float(env.done and env.place == env.door) for env in environments]


def main() -> None:
    """Train."""
    trainer = GRPOTrainer(
        model="walker",
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPT}]] * 64}),
        reward_funcs=reached,
        args=GRPOConfig(
            chat_template_kwargs={"enable_thinking": False}, logging_steps=1, log_completions=True,
            num_completions_to_print=2, max_completion_length=256, per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        ),
        environment_factory=CorridorEnv,
        peft_config=LoraConfig(),
        callbacks=[RichProgressCallback()],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
