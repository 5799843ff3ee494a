"""What the relay study trains: agents that carry facts through contexts by notes, and the arms of credit.

Each call's messages replace the last call's, so a context has one turn; what a note does not say is gone.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import Qwen2ForCausalLM, TrainerCallback, set_seed

from trl_stppo import STGRPOTrainer, STPPOTrainer
from trl_stppo.core import num_turns, token_gae, turn_starts, whiten
from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.trainer.batch import Batch, Targets, TurnBatch
from trl_stppo.trainer.bridge import is_warming_up
from trl_stppo.trainer.training_loop import TrainingLoop
from trl_stppo.watch import ProgressLines

PAGES = 8  # after the one with the code
SYMBOLS, FILLERS = [f"s{n}" for n in range(6)], [f"f{n}" for n in range(6)]
WORDS = ["note", "none", "page", "code", "ask", *map(str, range(PAGES + 1)), *SYMBOLS, *FILLERS]
PAGE, CONTEXT, NOTE = 17, 32, 4  # tokens of a page, of a context, of a turn
GROUPS = {"grpo": "turn-grpo", "rloo": "turn-rloo"}
EPISODES, MINI_BATCHES, WARM_UP = 64, 4, 2  # of a rollout; rollouts that train the critic alone
RATE, CRITIC_RATE = 5e-4, 3e-3
FIGURES = (
    "episode/score",
    "episode/success_rate",
    "completions/mean_length",
    "study/explained",
    "policy/entropy",
)
WINDOW, LEVEL = 5, 0.9
MISTAKES = 0.25  # of the taught agent's turns


def codes(dice: random.Random) -> str:
    """Two symbols."""
    return "".join(dice.choices(SYMBOLS, k=2))


def page(number: int, dice: random.Random, code: str | None) -> str:
    """A numbered page of PAGE tokens; the code, if there is one, is somewhere on it."""
    words = [dice.choice(FILLERS) for _ in range(PAGE - 2)]
    if code is not None:
        place = dice.randrange(PAGE - 4)
        words[place : place + 3] = ["code", code]
    return f"page{number}" + "".join(words)


def prompt(note: str, after: str) -> list[dict[str, str]]:
    """The whole context of a call."""
    return [{"role": "user", "content": f"note{note or 'none'}{after}"}]


async def say(client: Any, note: str, after: str) -> str:
    """The policy's turn."""
    messages = prompt(note, after)
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return str(answer.choices[0].message.content)


async def relay(client: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A code on the first of PAGES + 1 pages, a note after each, the code at the end; reward 1 or 0."""
    dice = random.Random(row["seed"])
    code = codes(dice)
    note = "none"
    for number in range(PAGES + 1):
        note = await say(client, note, page(number, dice, None if number else code))
    reward = float(await say(client, note, "ask") == code)
    return {"reward": reward, "success": reward == 1.0}


async def facts(client: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A fact on each of PAGES pages, which is asked for after it; each right answer is paid."""
    dice, paid = random.Random(row["seed"]), list[float]()
    note = "none"
    for number in range(PAGES):
        code = codes(dice)
        note = await say(client, note, page(number + 1, dice, code))
        paid += [0.0, float(await say(client, note, "ask") == code) / PAGES]
    return {"turn_rewards": paid, "success": sum(paid) > 0.999}


AGENTS = {"relay": relay, "facts": facts}


def lesson(dice: random.Random, swaps: float) -> list[dict[str, str]]:
    """A call and a careless answer.

    A mistake is two words such as pages have, or another code, with a share of `swaps`.
    """
    note = codes(dice) if dice.random() < 0.7 else "".join(dice.choices(FILLERS, k=2))
    shown, after = note, "ask"
    if (kind := dice.random()) < 0.8:
        fresh = codes(dice) if kind < 0.3 else None
        note = "none" if kind < 0.15 else note
        after = page(dice.randrange(PAGES + 1), dice, fresh)
        shown = fresh or note
    if dice.random() < MISTAKES:
        swapped = dice.random() < swaps
        shown = codes(dice) if swapped else "".join(dice.choices(FILLERS, k=2))
    return [*prompt(note, after), {"role": "assistant", "content": shown}]


def build_agent(folder: Path, seed: int, swaps: float = 0.0, steps: int = 500) -> Path:
    """Teach the agent of a seed by imitation of careless notes, unless it is there."""
    target = folder / f"agent-{swaps}-{seed}"
    if target.is_dir():
        return target
    set_seed(seed)
    dice = random.Random(seed)
    tokenizer = tiny_tokenizer(WORDS, vocab_size=300, markers=WORDS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes, initializer_range=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 2e-4)
    for _ in range(steps):
        batch = tokenizer.apply_chat_template(
            [lesson(dice, swaps) for _ in range(128)],
            padding=True,
            return_tensors="pt",
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        sampled = batch.pop("assistant_masks").bool()
        loss = model(**batch, labels=batch["input_ids"].masked_fill(~sampled, -100)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    staging = target.with_name(target.name + ".incomplete")
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(target)
    return target


# --------------------------------------------------------------------------------- credit


class CreditLoop(TrainingLoop):
    """The training loop with another credit for contexts, if the arm has one."""

    def targets(self, batch: Batch, turns: TurnBatch, scores: Tensor, *args: Any) -> Targets:
        """Replace advantages and the critic's targets; log what values at first prompts explain."""
        found = super().targets(batch, turns, scores, *args)
        if not self.host.has_critic:
            return found
        index, mask = turns.turn_index, batch["loss_mask"]
        if self.host.arm in ("each", "factor"):
            lam = self.args.lam
            local = 1.0 if is_warming_up(self.host) else lam
            rewards = context_rewards(turns.earned(scores), index, self.args.gamma * lam)
            raw, returns = context_gae(rewards, batch["values"], index, self.args.gamma, local)
            advantages = whiten(raw, mask, reduce=self.accelerator.reduce)
            found = Targets(rewards, raw, advantages, batch["values"], returns, mask)
            ahead = context_gae(rewards, torch.zeros_like(rewards), index, 1.0, 1.0)[1]
        else:
            ahead = found.rewards.flip(1).cumsum(1).flip(1)
        first = turn_starts(index) & mask
        self.log.add({"study/explained": explained(found.values[first], ahead[first])})
        return found


def context_rewards(earned: Tensor, index: Tensor, factor: float) -> Tensor:
    """Return rewards that end each context with the episode's reward times factor^(tokens after it).

    Args:
        earned: [B], rewards of episodes.
        index: [B, J] int64, k at the tokens of turn k, which is a context, -1 at padding.
        factor: gamma lambda; 1 gives each context the whole reward.
    """
    inside = index >= 0
    ends = inside & (index != torch.nn.functional.pad(index[:, 1:], (0, 1), value=-1))
    after = inside.sum(1, keepdim=True) - inside.cumsum(1)
    return (earned.unsqueeze(1) * factor**after).masked_fill(~ends, 0.0)


def context_gae(
    rewards: Tensor, values: Tensor, index: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute token GAE in each turn as if it were an episode of its own."""
    every = [
        token_gae(rewards, values, index == turn, gamma, lam)
        for turn in range(int(num_turns(index).max()))
    ]
    advantages, returns = zip(*every, strict=True)
    return sum(advantages), sum(returns)


def explained(values: Tensor, returns: Tensor) -> float:
    """Return the share of the variance of returns that values explain."""
    return float(1.0 - (returns - values).var() / returns.var().clamp(min=1e-12))


# -------------------------------------------------------------------------------- training


class Reached(TrainerCallback):
    """Keeps each rollout's figures; ends the run once the last `WINDOW` rollouts average `LEVEL`."""

    def __init__(self) -> None:
        self.curves: dict[str, list[float]] = {name: [] for name in FIGURES}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take in a rollout."""
        if FIGURES[0] not in logs:
            return
        for name, curve in self.curves.items():
            curve.append(float(f"{logs.get(name, 0.0):.4g}"))
        last = self.curves[FIGURES[0]][-WINDOW:]
        control.should_training_stop |= sum(last) >= LEVEL * WINDOW


def train(
    agent: Path, task: str, arm: str, lam: float, seed: int, rollouts: int, episodes: int = EPISODES
) -> dict[str, list[float]]:
    """Train an arm until it has learnt the task, or for so many rollouts; return its curves."""
    settings: dict[str, Any] = {
        "variant": GROUPS.get(arm, "ppo" if arm.endswith("-ppo") else "turn-ppo"),
        "seed": seed, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "num_ppo_epochs": 1, "num_mini_batches": MINI_BATCHES,
        "gradient_accumulation_steps": MINI_BATCHES, "total_episodes": episodes * rollouts,
        "per_device_train_batch_size": episodes // MINI_BATCHES,
        "max_turns": 2 * PAGES, "max_turn_tokens": NOTE, "max_completion_length": 2 * NOTE,
        "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "trace_episodes": 0,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    if arm in GROUPS:
        settings["num_generations"] = 8
    else:
        settings |= {"lam": lam, "advantage_level": "turn" if arm == "turn" else "token"}
        settings |= {"kl_coef": 0.0, "critic_learning_rate": CRITIC_RATE}
        settings["critic_warmup_steps"] = WARM_UP * MINI_BATCHES
    begin = [{"role": "user", "content": "relay"}]
    first = 10**6 * (1 + seed)
    rows = [{"prompt": begin, "seed": first + n} for n in range(episodes * rollouts)]
    kind, reached = STGRPOTrainer if arm in GROUPS else STPPOTrainer, Reached()
    with tempfile.TemporaryDirectory() as folder:
        own = {"loop_class": CreditLoop, "arm": arm.removesuffix("-ppo")}
        trainer = type("RelayTrainer", (kind,), own)(
            model=str(agent),
            args=kind.config_class(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(rows),
            agent=AGENTS[task],
            callbacks=[reached],
        )
        trainer.remove_callback(ProgressLines)
        trainer.train()
    return reached.curves
