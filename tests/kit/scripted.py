"""Trainers that are fed scripted episodes, so that two of them see exactly the same rollouts.

A row's prompt is its number; everything about its episode follows from that number, and from how often the
number has come up in the batch of a process. With `stale`
the sampler is made to differ from the policy by a fixed noise, so that tokens are clipped at the very
first optimizer step.
"""

from collections.abc import Collection
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.kit.builders import with_estimator
from tests.kit.fakes import char_tokenizer, float64_policy, float64_value_model
from tests.kit.run_log import comparable
from tests.kit.surroundings import USE_CPU
from trl_stppo import STGRPOTrainer, STPPOTrainer
from trl_stppo.trainer.batch import full_sequence
from trl_stppo.trainer.loop.forward import ForwardPasses, Logprobs

EPISODES = 8
DEFAULTS = {
    "variant": "s-ppo", "per_device_train_batch_size": EPISODES,
    "gradient_accumulation_steps": 1, "num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 1,
    "optim": "sgd", "learning_rate": 0.1, "critic_learning_rate": 0.05, "cliprange": 0.2,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "bf16": False,
    "gradient_checkpointing": False, "shuffle_dataset": False, "use_cpu": USE_CPU,
    "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip

# Enough steps for every part of an adapter to move: the critic's head first, then its B, then A.
STEPS = 4
LEARNS = {
    "trainer_class": STPPOTrainer, "optim": "adamw_torch", "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2, "num_ppo_epochs": 2, "max_steps": STEPS,
}  # fmt: skip

# Options of `scripted_trainer` that are arguments of the trainer; all others are settings.
ARGUMENTS = (
    "model", "value_model", "ref_model", "peft_config", "quantization_config", "rollout_func",
    "train_dataset", "eval_dataset", "callbacks",
)  # fmt: skip


def numbered_rows(count: int = EPISODES) -> Dataset:
    """Rows whose prompts are "0", "1", ..."""
    return Dataset.from_dict({"prompt": [str(i) for i in range(count)]})


def play_script(prompts: list[str], trainer: Any = None) -> dict[str, Any]:
    """A rollout_func: two or three turns of uneven lengths, a reward for each, all from the number."""
    output: dict[str, Any] = {
        key: [] for key in ("prompt_ids", "completion_ids", "turn_spans", "turn_rewards")
    }
    for i, prompt in enumerate(prompts):
        number = int(prompt)
        draw = torch.Generator().manual_seed(1000 + number + 100 * prompts[:i].count(prompt))
        lengths = torch.randint(1, 5, (2 + number % 2,), generator=draw).tolist()
        spans, end = [], 0
        for turn, length in enumerate(lengths):
            # Two tokens of observation lie between the turns.
            start = end + (2 if turn else 0)
            end = start + length
            spans.append((start, end))
        ids = torch.randint(3, 90, (3 + number % 3 + end,), generator=draw).tolist()
        output["prompt_ids"].append(ids[: len(ids) - end])
        output["completion_ids"].append(ids[len(ids) - end :])
        output["turn_spans"].append(spans)
        output["turn_rewards"].append(torch.randn(len(spans), generator=draw).tolist())
    return {**output, "logprobs": None}


class InFloat64:
    """Keeps logprobs in float64; TRL's fused head rounds them to float32."""

    temperature: float
    _forward: ForwardPasses

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Logprobs:
        def plain(model: nn.Module, ids: Tensor, mask: Tensor, keep: int, **flags: bool) -> Any:
            return (*plain_logprobs(model, ids, mask, keep, self.temperature), None)

        return self._forward.logprobs(plain, *args, **kwargs)


class Float64Trainer(InFloat64, STPPOTrainer):
    """With a critic."""


class Float64Groups(InFloat64, STGRPOTrainer):
    """Without one."""


def plain_logprobs(
    model: nn.Module, ids: Tensor, mask: Tensor, length: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at each of the last `length` tokens, [B, T] each."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions)
    logits = output.logits[:, -length - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, -length:].unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


@torch.no_grad()
def batch_logprobs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Log-probabilities of a batch's completions, 0 at padding, [B, T]."""
    values, _ = plain_logprobs(model, *full_sequence(batch))
    return values * batch["completion_mask"]


def stale(trainer: STPPOTrainer, size: float = 0.6, numbers: Collection[int] | None = None) -> None:
    """Pretend that another policy sampled: shift the old logprobs by a noise fixed per row.

    The shift has this standard deviation in nats; of the episodes those of these numbers, or all, are stale.
    """
    original = trainer._generate_and_score_completions

    def generate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = original(rows)
        old = batch["old_per_token_logps"]
        for i, row in enumerate(rows):
            if numbers is not None and int(row["prompt"]) not in numbers:
                continue
            draw = torch.Generator().manual_seed(int(row["prompt"]))
            noise = torch.randn(32, generator=draw, dtype=torch.float64)
            old[i] += size * noise[: old.size(1)].to(old)
        return batch

    trainer._generate_and_score_completions = generate


class Recorder(TrainerCallback):
    """Keeps, for every optimizer step, the policy's gradient as the optimizer gets it, and weights."""

    def __init__(self) -> None:
        self.trainer: STPPOTrainer | None = None
        self.before: dict[str, Tensor] = {}
        self.grads: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []
        self.batches: list[dict[str, Tensor]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before = weights(self.trainer)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        named = policy_parameters(self.trainer).items()
        self.grads.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        parts = self.trainer._buffered_inputs
        tensors = [k for k, v in parts[0].items() if isinstance(v, Tensor) and v.ndim > 0]
        self.batches.append({key: torch.cat([part[key] for part in parts]) for key in tensors})

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.after.append(weights(self.trainer))

    def moved(self, part: str, step: int = 0) -> dict[str, Tensor]:
        """New minus old weights of "policy" or "critic" at one step."""
        old = self.after[step - 1] if step else self.before
        new = self.after[step]
        return {n: new[n] - old[n] for n in new if n.startswith(part + "/")}


def policy_parameters(trainer: STPPOTrainer) -> dict[str, nn.Parameter]:
    """The policy's trainable parameters."""
    critic = {id(p) for p in trainer.critic.parameters()}
    named = trainer.model.named_parameters()
    return {n: p for n, p in named if p.requires_grad and id(p) not in critic}


def weights(trainer: STPPOTrainer) -> dict[str, Tensor]:
    """Copies of everything that is trained, as "policy/..." and "critic/..."."""
    policy = {f"policy/{n}": p for n, p in policy_parameters(trainer).items()}
    critic = {f"critic/{i}": p for i, p in enumerate(trainer.critic.parameters())}
    return {name: p.detach().clone() for name, p in {**policy, **critic}.items()}


def scripted_trainer(
    folder: Any,
    *,
    trainer_class: type[STPPOTrainer] = Float64Trainer,
    staleness: float = 0.6,
    stale_episodes: Collection[int] | None = None,
    rows: int = EPISODES,
    **options: Any,
) -> tuple[STPPOTrainer, Recorder]:
    """A trainer of tiny models on scripted episodes, and the recorder of its steps.

    What needs TRL's fused head takes `STPPOTrainer` itself. Options are settings that differ from DEFAULTS,
    and arguments of the trainer's constructor.
    """
    tokenizer = char_tokenizer()
    arguments = {key: options.pop(key) for key in ARGUMENTS if key in options}
    if "model" not in arguments:
        arguments["model"] = float64_policy(tokenizer)
    settings = {**DEFAULTS, **options}
    if str(settings["variant"]).startswith(("s-", "st-")):
        settings = {"stabilizers": ["share"], "clip_bias_estimator": "exact", **settings}
    kind = getattr(trainer_class, "func", trainer_class)
    if not kind.has_critic:
        del settings["critic_learning_rate"]
    elif not {"value_model", "peft_config"} & {*arguments}:
        arguments["value_model"] = float64_value_model(tokenizer)
    recorder = Recorder()
    arguments["callbacks"] = [recorder, *arguments.get("callbacks", [])]
    defaults = {"train_dataset": numbered_rows(rows), "rollout_func": play_script}
    args = with_estimator(kind.config_class, {"output_dir": str(folder), **settings})
    trainer = trainer_class(args=args, processing_class=tokenizer, **{**defaults, **arguments})
    recorder.trainer = trainer
    if staleness:
        stale(trainer, staleness, stale_episodes)
    return trainer, recorder


def train(folder: Any, **options: Any) -> tuple[STPPOTrainer, Recorder]:
    """Build a scripted trainer and let it train."""
    trainer, recorder = scripted_trainer(folder, **options)
    trainer.train()
    return trainer, recorder


def logged(trainer: STPPOTrainer, name: str) -> list[float]:
    """A metric at every optimizer step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def norm(tensors: Any) -> float:
    """L2 norm of several tensors together."""
    values = tensors.values() if isinstance(tensors, dict) else tensors
    return torch.cat([t.flatten().double() for t in values]).norm().item()


def assert_same_weights(one: STPPOTrainer, other: STPPOTrainer) -> None:
    """All that two trainers train is equal, bit for bit."""
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(mine[name], weight), name


def assert_same_run(one: STPPOTrainer, other: STPPOTrainer) -> None:
    """Two trainers have come to the same weights by the same log."""
    assert_same_weights(one, other)
    assert comparable(one.state.log_history) == comparable(other.state.log_history)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    """Equal up to rounding, `rtol` of the largest element."""
    assert actual.keys() == expected.keys()
    scale = max(t.abs().max().item() for t in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=rtol * scale)
