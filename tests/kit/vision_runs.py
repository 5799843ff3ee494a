"""Trainings of small vision models in an environment that shows images."""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from tests.kit.builders import quick_config
from tests.kit.vision import picture, vision_model
from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.rollout.images import ImageReader
from trl_stppo.trainer.training_loop import TrainingLoop

# Plain SGD, so that a difference of gradients stays a difference of weights.
SGD = {
    "optim": "sgd", "learning_rate": 1e-2, "critic_learning_rate": 1e-2, "max_grad_norm": 0.0,
    "kl_coef": 0.05, "num_mini_batches": 1, "max_steps": 1, "max_turns": 3, "max_turn_tokens": 8,
    "max_completion_length": 400, "seed": 1,
}  # fmt: skip


class Pictures:
    """Shows an image after each turn; some episodes see the same, others one of the same size."""

    turns = 3

    def reset(self, seed: int = 0, task: int = 0) -> Any:
        self.count, self.seed = 0, seed
        image = {"type": "image", "image": picture(task % 3, 24, 16)}
        return [image, {"type": "text", "text": " go"}], {}

    def step(self, action: str) -> Any:
        self.count += 1
        image = picture(self.seed % 97 + self.count, 8 + 8 * (self.count % 3), 16)
        blocks = [{"type": "text", "text": "now "}, {"type": "image", "image": image}]
        return blocks, (sum(map(ord, action)) % 7) / 7, self.count >= self.turns, False, {}


class Sometimes(Pictures):
    """Shows no image in some episodes."""

    def reset(self, seed: int = 0, task: int = 0) -> Any:
        opening, info = super().reset(seed, task)
        return (opening if task % 2 else "nothing to see"), info

    def step(self, action: str) -> Any:
        blocks, *rest = super().step(action)
        return (blocks if self.seed % 3 else "nothing"), *rest


class Once(Pictures):
    """Shows an image in one episode only."""

    turns = 1

    def reset(self, seed: int = 0, task: int = 0) -> Any:
        opening, info = super().reset(seed, task)
        return (opening if task == 3 else "nothing to see"), info

    def step(self, action: str) -> Any:
        return "over", *super().step(action)[1:]


class KeepingLoop(TrainingLoop):
    """Keeps what the last update was made of."""

    def report(self, played: Any, scored: Any, estimates: Any, data: Any, seconds: float) -> None:
        self.host.played, self.host.data, self.host.estimates = played, data, estimates
        super().report(played, scored, estimates, data, seconds)


class KeepingTrainer(STPPOTrainer):
    loop_class = KeepingLoop


def rows(count: int = 8) -> Dataset:
    prompt = [{"role": "user", "content": "look: "}]
    return Dataset.from_dict({"prompt": [prompt] * count, "task": list(range(count))})


def vision_trainer(folder: Any, family: str, env: Any = Pictures, **options: Any) -> Any:
    """A trainer of a family's small model, not trained yet."""
    model, processor = vision_model(family)
    model = options.pop("model", None) or model.train()
    change = options.pop("change", None)
    if change is not None:
        change(processor)
    processor.chat_template = options.pop("template", processor.chat_template)
    given = {
        name: options.pop(name)
        for name in (
            *("train_dataset", "tools", "peft_config", "reward_funcs", "value_model"),
            *("turn_reward_funcs", "agent"),
        )
        if name in options
    }
    kind = options.pop("trainer_class", KeepingTrainer)
    args = quick_config(folder, STPPOConfig, **{**SGD, "trace_episodes": 0, **options})
    return kind(
        model=model,
        args=args,
        processing_class=processor,
        environment_factory=env,
        **{"train_dataset": rows(), **given},
    )


def trained(trainer: Any) -> Any:
    """The trainer after its training, with the moves of the policy's and the critic's weights."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    critic = [p.detach().clone() for p in trainer.critic.parameters()]
    trainer.train()
    trainer.moved = {n: p.detach() - before[n] for n, p in trainer.model.named_parameters()}
    pairs = zip(trainer.critic.parameters(), critic, strict=True)
    trainer.critic_moved = [p.detach() - old for p, old in pairs]
    return trainer


@torch.no_grad()
def own_table(model: Any, reader: ImageReader, ids: list[int], images: list[Any]) -> Tensor:
    """Log-probabilities [L, vocabulary] by the model's own pass, which computes positions itself."""
    row = torch.tensor([ids])
    inputs = reader.model_inputs(images, row)
    mask = torch.ones_like(row)
    logits = model(input_ids=row, attention_mask=mask, use_cache=False, **inputs).logits
    return logits[0].log_softmax(-1)


def own_logprobs(trainer: Any) -> Tensor:
    """Log-probabilities of the kept batch's sampled tokens, each row by itself, [N, T]."""
    data, model = trainer.data, trainer.accelerator.unwrap_model(trainer.model)
    found = torch.zeros(data["completion_ids"].shape)
    contexts = [context for _, context in trainer.played.contexts]
    for number, context in enumerate(contexts):
        row, first = context.prompt_ids + context.ids, len(context.prompt_ids)
        table = own_table(model, trainer.reader, row, context.images)
        for start, end in context.turn_spans:
            at = torch.arange(first + start - 1, first + end - 1)
            found[number, start:end] = table[at, torch.tensor(context.ids[start:end])]
    return found
