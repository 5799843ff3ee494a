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
    "variant": "st-ppo", "num_ppo_epochs": 2, "max_steps": 2,
    "gamma": page.GAMMA,
    "cliprange_value": page.CLIPRANGE_VALUE, "vf_coef": page.VF_COEF,
    "max_grad_norm": page.MAX_GRAD_NORM, "optim": "adamw_torch", "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2, "kl_coef": 0.0, "cliprange": None,
}  # fmt: skip


def play(prompts, trainer=None):
    """Scripted episodes as the page has them: prompts of one length, paid at the end alone."""
    script = play_script(prompts)
    script["prompt_ids"] = [ids[:3] for ids in script["prompt_ids"]]
    script["turn_rewards"] = [
        [0.0 * reward for reward in rewards[:-1]] + rewards[-1:]
        for rewards in script["turn_rewards"]
    ]
    return script


def episodes_of(batch, scores) -> page.Episodes:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    prompt = torch.full_like(batch["prompt_ids"], -1)
    return page.Episodes(ids, torch.cat([prompt, batch["turn_index"]], dim=1), scores)


class Keeping(Keeps, Float64Trainer):
    """Keeps the rollout batch, which is shuffled afterwards."""


def test_an_update_equals_the_trainers(tmp_path):
    trainer, recorder = scripted_trainer(
        tmp_path, trainer_class=Keeping, staleness=0.0, rollout_func=play, **SETTINGS
    )
    trainer.train()
    _, kept, *_ = trainer.kept[0]
    scores = torch.tensor(trainer.scored[0].totals, dtype=torch.float64)

    tokenizer = char_tokenizer()
    policy, critic = float64_policy(tokenizer).eval(), float64_value_model(tokenizer).eval()
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=SETTINGS["learning_rate"], weight_decay=0.0)
    batch = page.prepare(policy, critic, episodes_of(kept, scores))
    scales = [page.step(policy, critic, optimizer, batch) for _ in range(2)]

    assert scales == pytest.approx(logged(trainer, "clip_bias/scale"), rel=1e-9)
    assert scales[0] == 1.0 > scales[1]
    names = list(recorder.before)
    ours = dict(zip(names, parameters, strict=True))
    moved = {n: ours[n].detach() - recorder.before[n] for n in names}
    assert_same(moved, {n: recorder.after[-1][n] - recorder.before[n] for n in names})


@pytest.mark.slow
def test_it_learns(capsys):
    page.main(seed=0)
    before, after = re.search(r"success (\S+) -> (\S+)", capsys.readouterr().out).groups()
    assert float(after) > float(before) + 0.25
