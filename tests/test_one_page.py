"""The algorithm on one page does what the trainer does, and learns."""

import re

import pytest
import torch

from scripts import st_ppo_one_page as page
from tests.kit.builders import Keeps
from tests.kit.fakes import char_tokenizer, float64_policy, float64_value_model
from tests.kit.scripted import Float64Trainer, assert_same, logged, play_script, scripted_trainer

# The page's settings, in the trainer's words. One mini-batch: the trainer shuffles otherwise than the page.
SETTINGS = {
    "variant": "st-ppo", "stabilizers": ["trust_region", "share"], "clip_bias_estimator": "logits",
    "num_ppo_epochs": 2, "max_steps": 4, "per_device_train_batch_size": 16,
    "gamma": page.GAMMA,
    "cliprange_value": page.CLIPRANGE_VALUE, "vf_coef": page.VF_COEF,
    "max_grad_norm": page.MAX_GRAD_NORM, "optim": "adamw_torch", "learning_rate": 0.1,
    "critic_learning_rate": 0.1, "kl_coef": 0.0, "cliprange": None,
}  # fmt: skip


def play(prompts, trainer=None):
    """Scripted episodes as the page has them: prompts of one length, paid at the end alone."""
    script = play_script(prompts)
    script["prompt_ids"] = [ids[:3] for ids in script["prompt_ids"]]
    script["turn_rewards"] = [
        [0.0 * reward for reward in rewards[:-1]] + rewards[-1:] for rewards in script["turn_rewards"]
    ]
    return script


def episodes_of(batch, scores) -> page.Episodes:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    prompt = torch.full_like(batch["prompt_ids"], -1)
    return page.Episodes(ids, torch.cat([prompt, batch["turn_index"]], dim=1), scores)


class Keeping(Keeps, Float64Trainer):
    """Keeps the rollout batch, which is shuffled afterwards."""


@pytest.mark.parametrize("desired_kl", [1.0, 1e-6])
def test_two_updates_equal_the_trainers(desired_kl, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DESIRED_KL", desired_kl)
    trainer, recorder = scripted_trainer(
        tmp_path, trainer_class=Keeping, staleness=0.0, rollout_func=play, rows=16, desired_kl=desired_kl,
        **SETTINGS,
    )  # fmt: skip
    trainer.train()

    tokenizer = char_tokenizer()
    policy, critic = float64_policy(tokenizer).eval(), float64_value_model(tokenizer).eval()
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=SETTINGS["learning_rate"], weight_decay=0.0)
    region, scales = page.Region(), []
    for (_, kept, *_), scored in zip(trainer.kept, trainer.scored, strict=True):
        scores = torch.tensor(scored.totals, dtype=torch.float64)
        batch = page.prepare(policy, critic, episodes_of(kept, scores))
        region.begin(float(batch.spread[0]))
        scales += [page.step(policy, critic, optimizer, batch, region) for _ in range(2)]
        region.end()

    factors = [0.1, 0.1, *logged(trainer, "step/factor")[1:3]]
    shares = logged(trainer, "clip_bias/scale")
    assert scales == pytest.approx([f * s for f, s in zip(factors, shares, strict=True)], rel=1e-9)
    assert logged(trainer, "step/refused")[-1] == (0 if desired_kl == 1.0 else 2)
    names = list(recorder.before)
    ours = dict(zip(names, parameters, strict=True))
    moved = {n: ours[n].detach() - recorder.before[n] for n in names}
    assert_same(moved, {n: recorder.after[-1][n] - recorder.before[n] for n in names})


@pytest.mark.slow
def test_it_learns(capsys):
    page.main(seed=0)
    before, after = re.search(r"success (\S+) -> (\S+)", capsys.readouterr().out).groups()
    assert float(after) > float(before) + 0.25
