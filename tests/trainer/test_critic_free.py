"""RLOO and ReBN through `trainer.train()`: TRL's numbers, GEM's formula, what is refused."""

import pytest
import torch
from trl import RLOOConfig, RLOOTrainer

from tests.kit import references
from tests.kit.builders import (
    LIMITS,
    QUICK,
    TEXT,
    KeptGroups,
    build,
    logs,
    prompts,
    quick_config,
    train,
)
from tests.kit.fakes import CountEnv, char_tokenizer, float64_policy, tiny_policy
from tests.kit.scripted import assert_same_run
from tests.kit.tiers import quick
from trl_stppo import STGRPOConfig, STGRPOTrainer
from trl_stppo.trainer.loop.sampler import TurnSampler

CRITICS = ("critic_learning_rate", "num_mini_batches", "num_ppo_epochs")
ONE_BATCH = {"num_mini_batches": 1, "gradient_accumulation_steps": 2}
TURNS = {"importance_sampling_level": "turn"}
SINGLE = {**ONE_BATCH, "num_generations": 1, "variant": "rebn"}


@pytest.mark.parametrize("variant", ["grpo", "rloo"])
def test_a_score_on_its_groups_mean_teaches_nothing_in_whatever_order_it_was_paid(variant, tmp_path):
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 once rounded."""
    orders = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]

    def pay(prompts, trainer):
        ids, count = [5, 6, 7], len(prompts)
        rewards = [orders[i % 2] for i in range(count)]
        rewards[-1], rewards[-3] = (
            [0.1, 0.2, 1.3],
            [0.1, 0.2, -0.7],
        )
        spans = [[(0, 1), (1, 2), (2, 3)]] * count
        same = {"prompt_ids": [ids] * count, "completion_ids": [ids] * count, "logprobs": None}
        return {**same, "turn_spans": spans, "turn_rewards": rewards}

    options = {"num_generations": 4, "max_steps": 1, "variant": variant, **ONE_BATCH}
    arguments = {
        "rollout_func": pay,
        "reward_funcs": None,
        "model": float64_policy(char_tokenizer()),
    }
    trainer = train(tmp_path, KeptGroups, arguments=arguments, **options)
    _, _, turns, scores, targets = trainer.kept[-1]
    totals = turns.totals(scores)
    assert totals[0] != totals[1], "the case should be interesting"
    teaches = (targets.advantages != 0).any(dim=1).tolist()
    assert teaches == [False] * (len(totals) - 3) + [True, False, True]
    assert logs(trainer)["frac_reward_zero_std"] == 1 - 4 / len(totals)


def letters(completions, **columns):
    """Different rewards within most groups."""
    return [len(set(c[-1]["content"])) / 4 for c in completions]


def some_unscored(completions, **columns):
    """The same, and none at all for some episodes."""
    return [None if 4 * r % 3 == 0 else r for r in letters(completions)]


@pytest.mark.long
@pytest.mark.parametrize("rewards", quick([letters, some_unscored], some_unscored))
def test_rloo_is_trls_rloo(rewards, tmp_path, monkeypatch):
    """On the policy, with KL in the reward and normalised advantages, which are not here, off there.

    The ratio there is the product over an episode, 1 like ours while nothing has moved. The tokens of an
    episode are summed there; `dr_grpo` does that but for a constant, which the rate takes in.
    """
    # Otherwise ours draws each answer from a seed of its own.
    monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "As TRL does it.")
    length, rate = 12, 0.002
    settings = {k: v for k, v in QUICK.items() if k not in CRITICS} | {"disable_dropout": True}
    settings |= {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"num_generations": 4, "max_steps": 4, "max_completion_length": length}
    tokenizer, trained = char_tokenizer(), []
    tiny_policy(tokenizer).save_pretrained(tmp_path / "policy")
    for kind, config, own in (
        (RLOOTrainer, RLOOConfig, {"beta": 0.0, "learning_rate": rate}),
        (
            STGRPOTrainer,
            STGRPOConfig,
            {"variant": "rloo", "loss_type": "dr_grpo", "learning_rate": rate * length},
        ),
    ):
        trainer = kind(
            model=str(tmp_path / "policy"),
            reward_funcs=rewards,
            args=config(output_dir=str(tmp_path), **{**settings, **own}),
            train_dataset=prompts(),
            processing_class=tokenizer,
        )
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        trained.append(trainer)
    theirs, ours = trained
    moved = 0.0
    for (name, p), q in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        moved = max(moved, float((p - start[name]).detach().abs().max()))
        assert torch.allclose(p, q, atol=2e-6), name
    assert moved > 1e-3
    for name in ("frac_reward_zero_std", "completions/mean_length"):
        assert logs(ours)[name] == pytest.approx(logs(theirs)[name], abs=1e-6), name
    if rewards is letters:
        for name in ("reward", "reward_std"):
            assert logs(ours)[name] == pytest.approx(logs(theirs)[name], abs=1e-6), name


class Uneven(CountEnv):
    """Pays and ends by the row's `number`; breaks where it is 2."""

    def reset(self, *, number=0, **row):
        self._number, self._turns = number, 0
        return "", {}

    def step(self, action):
        self._turns += 1
        if self._number == 2 and self._turns == 2:
            raise OSError("broken on purpose")
        reward = (self._number % 3) * 0.5 + self._turns
        return "go on", reward, self._turns == 1 + self._number % 3, False, {}


class Numbered(KeptGroups):
    def _generate_and_score_completions(self, inputs):
        rows = [{**row, "number": i} for i, row in enumerate(inputs)]
        return super()._generate_and_score_completions(rows)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_rebn_is_gems_formula_over_the_turns_of_the_batch(gamma, tmp_path):
    options = {**SINGLE, **LIMITS, "gamma": gamma, "max_steps": 1}
    trainer = build(tmp_path, Numbered, arguments={"environment_factory": Uneven}, **options)
    trainer.train()
    _, batch, turns, _, targets = trainer.kept[-1]
    rewards = torch.zeros_like(targets.advantages)
    for b, row in enumerate(turns.turn_index.tolist()):
        for k in range(max(row) + 1):
            rewards[b, max(t for t, i in enumerate(row) if i == k)] = turns.turn_rewards[b, k]
    assert not batch["loss_mask"][2].any()
    assert (turns.turn_index[2] >= 0).any()
    assert turns.turn_rewards[2, 0] == 2.0
    lists = (x.tolist() for x in (rewards, turns.turn_index, batch["loss_mask"]))
    expected = torch.tensor(references.return_batch_norm(*lists, gamma))
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=1e-6)
    assert (batch["advantages"][~batch["loss_mask"]] == 0).all()
    # All tokens of a turn have the same, and turns of one episode differ.
    first = batch["advantages"][1], turns.turn_index[1]
    values = [first[0][first[1] == k].unique() for k in (0, 1)]
    assert [len(v) for v in values] == [1, 1]
    assert values[0] != values[1]


def test_scores_of_reward_functions_are_paid_on_the_last_turn_and_hidden_episodes_do_not_count(
    tmp_path,
):
    """An episode that was cut off has no turn; the others are those that end in time."""
    options = {**SINGLE, "mask_truncated_completions": True, "max_completion_length": 80}
    trainer = build(tmp_path, KeptGroups, arguments={"reward_funcs": letters}, **options, max_steps=1)
    trainer.train()
    _, batch, turns, scores, _ = trainer.kept[-1]
    lasts = (turns.turn_index >= 0).sum(dim=1)
    assert 0 < (lasts == 0).sum() < 7
    paid = scores[lasts > 0].double()
    expected = (paid - paid.mean()) / (paid.std(correction=0) + 1e-9)
    found = [row[mask].unique() for row, mask in zip(batch["advantages"], batch["loss_mask"], strict=True)]
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", quick(["rebn", "rloo", "st-grpo"], "rebn", "st-grpo"))
def test_a_resumed_run_ends_like_the_whole_one(variant, tmp_path):
    options = {**ONE_BATCH, **LIMITS, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    options |= {"num_iterations": 2, "num_ppo_epochs": None, "variant": variant}
    options |= {**TURNS, "stabilizers": "share"}
    options |= {"num_generations": 1, "gamma": 0.9} if "rebn" in variant else {"num_generations": 4}
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trainer = build(tmp_path, STGRPOTrainer, arguments=TEXT, **options)
        trainer.train(resume_from_checkpoint=resume)
        runs.append(trainer)
    whole, resumed = runs
    assert_same_run(resumed, whole)


@pytest.mark.parametrize(("options", "level", "stabilizers", "estimator"), [
    ({"variant": "grpo"}, "token", [], "group"),
    ({"variant": "gspo"}, "sequence", [], "group"),
    ({"variant": "st-grpo"}, "turn", ["trust_region", "share"], "group"),
    ({"variant": "rloo"}, "token", [], "leave_one_out"),
    ({"variant": "rebn"}, "token", [], "batch"),
    ({"variant": "rloo", **TURNS, "stabilizers": "share"}, "turn", ["share"], "leave_one_out"),
    ({"variant": "rebn", **TURNS}, "turn", [], "batch"),
    ({**TURNS, "stabilizers": "none"}, "turn", [], "group"),
])  # fmt: skip
def test_a_variant_is_a_ratio_a_correction_and_an_estimator(options, level, stabilizers, estimator, tmp_path):
    args = quick_config(tmp_path, STGRPOConfig, num_generations=4, **options)
    assert args.advantage_estimator == estimator
    assert (args.importance_sampling_level, args.stabilizers) == (level, stabilizers)


# Settings, words of the message.
REFUSED = [
    ({"gamma": 0.9}, "`gamma=0.9`: .*`variant='st-grpo'`"),
    ({"gamma": 0.9, "lam": 1.0}, "`gamma=0.9`, `lam=1.0`"),
    ({"variant": "rloo", "gamma": 0.9}, "`gamma=0.9`: .*`variant='rloo'`"),
    ({"variant": "rebn", "lam": 1.0}, "`lam=1.0`"),
    ({"variant": "rebn", "gamma": 1.5}, "`gamma=1.5`"),
    ({"variant": "rebn", "kl_coef": 0.1}, "`kl_coef=0.1`.*`beta`"),
    ({"critic_learning_rate": 1e-4}, "`critic_learning_rate=0.0001`"),
    ({"variant": "rebn", "scale_rewards": "batch"}, "`scale_rewards='batch'`"),
    ({"variant": "rloo", "scale_rewards": "none"}, "`scale_rewards='none'`"),
    ({"scale_rewards": "all"}, "`scale_rewards='all'`"),
    ({"num_generations": 1}, "`num_generations=1`.*variant='rebn'"),
    ({"variant": "rloo", "num_generations": 1}, "`num_generations=1`"),
    *(({"variant": name, "num_generations": 3}, "num_generations") for name in ("rebn", "rloo")),
    *(({"variant": name}, f"`variant='{name}'`.*'rebn'") for name in ("reinforce", "st-ppo")),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation="),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_what_makes_no_sense_together_is_refused(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        quick_config(tmp_path, STGRPOConfig, **{"num_generations": 4, **options})
