"""With `variant="ppo"` the whole trainer repeats the recorded update of TRL 1.12's PPOTrainer.

Only what the recording fixes is injected: prompts, responses and scores. Logprobs, values, KL, rewards,
advantages, losses, gradients and weights are the trainer's own.
"""

import pytest
import torch
from datasets import Dataset

from tests.kit.oracle import VARIANTS, Oracle, OracleModels, build_models, load_oracle
from tests.kit.scripted import DEFAULTS, Recorder, logged
from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.trainer.training_loop import TrainingLoop

# TRL's fused head adds up products over the hidden size, and exponentials over the vocabulary, in float32.
SIZES = load_oracle("one_epoch").settings["model"]
TOLERANCE = (SIZES["hidden_size"] + SIZES["vocab_size"]) * torch.finfo(torch.float32).eps
KEPT = ("gamma", "lam", "cliprange", "cliprange_value", "vf_coef", "kl_coef", "kl_estimator")


class Replay:
    """Rollout and reward function that hand out what was recorded, by prompt."""

    def __init__(self, oracle: Oracle, models: OracleModels) -> None:
        t = oracle.tensors
        self.prompts = [ids[mask].tolist() for ids, mask in zip(t["query_ids"], t["query_mask"], strict=True)]
        self.responses = t["response_ids"].tolist()
        self.scores = t["scores"].tolist()
        texts = [models.tokenizer.decode(ids) for ids in self.prompts]
        assert len(set(texts)) == len(texts)
        self.row = {text: i for i, text in enumerate(texts)}

    def rollout(self, prompts, trainer):
        rows = [self.row[prompt] for prompt in prompts]
        prompt_ids = [self.prompts[i] for i in rows]
        responses = [self.responses[i] for i in rows]
        return {"prompt_ids": prompt_ids, "completion_ids": responses, "logprobs": None}

    def score(self, prompts, completions, **kwargs):
        return [self.scores[self.row[prompt]] for prompt in prompts]


class ReplayLoop(TrainingLoop):
    def report(self, played, scored, estimates, *args):
        self.host.estimates, self.host.kl = estimates.targets, estimates.kl
        super().report(played, scored, estimates, *args)


class ReplayTrainer(STPPOTrainer):
    """Keeps the unshuffled rollout batch and the raw advantages."""

    loop_class = ReplayLoop

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.rollout_batch = dict(batch)
        return batch


def prompt_dataset(oracle: Oracle, with_mask: bool) -> Dataset:
    """Pre-tokenised prompts, padded on the left as PPO scripts have them."""
    columns = {"input_ids": oracle.tensors["query_ids"].tolist()}
    if with_mask:
        columns["attention_mask"] = oracle.tensors["query_mask"].long().tolist()
    return Dataset.from_dict(columns)


def run(oracle: Oracle, folder, *, accumulation: int = 1, with_mask: bool = True, **options):
    models, ppo = build_models(oracle), oracle.settings["ppo"]
    replay = Replay(oracle, models)
    trained = [*models.policy.parameters(), *models.value.parameters()]
    settings = {
        **DEFAULTS, **{name: ppo[name] for name in KEPT}, "variant": "ppo", "loss_type": "bnpo",
        "temperature": ppo["temperature"], "response_length": ppo["response_length"],
        "num_ppo_epochs": ppo["num_ppo_epochs"], "max_steps": ppo["num_ppo_epochs"],
        "per_device_train_batch_size": ppo["per_device_train_batch_size"] // accumulation,
        "gradient_accumulation_steps": accumulation, "remove_unused_columns": False,
    }  # fmt: skip
    recorder = Recorder()
    trainer = ReplayTrainer(
        model=models.policy, reward_funcs=replay.score,
        args=STPPOConfig(output_dir=str(folder), **{**settings, **options}),
        train_dataset=prompt_dataset(oracle, with_mask), processing_class=models.tokenizer,
        callbacks=[recorder],
        optimizers=(torch.optim.SGD(trained, lr=oracle.settings["optimizer"]["lr"]), None),
        rollout_func=replay.rollout, value_model=models.value, ref_model=models.ref,
    )  # fmt: skip
    recorder.trainer = trainer
    trainer.train()
    return trainer, recorder, models


@pytest.fixture(scope="module", autouse=True)
def unscaled_states():
    """TRL's critic reads its backbone's states as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "rms_norm", lambda states, *args, **kwargs: states)
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def finished(request, tmp_path_factory):
    """Oracle, trainer, recorder and models after the recorded number of steps."""
    oracle = load_oracle(request.param)
    return oracle, *run(oracle, tmp_path_factory.mktemp("parity"))


def close(actual, expected, atol: float = TOLERANCE) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_rollout_quantities_equal_the_recorded_ones(finished):
    oracle, trainer, _, _ = finished
    batch, t = trainer.rollout_batch, oracle.tensors
    assert torch.equal(batch["completion_ids"], t["response_ids"])
    assert torch.equal(batch["prompt_ids"] * t["query_mask"], t["query_ids"] * t["query_mask"])
    close(batch["old_per_token_logps"], t["logprobs"])
    close(batch["ref_per_token_logps"], t["ref_logprobs"])
    close(batch["values"], t["values"])
    close(trainer.kl, t["kl"])


def test_rewards_advantages_and_returns_equal_the_recorded_ones(finished):
    oracle, trainer, _, _ = finished
    t, estimates = oracle.tensors, trainer.estimates
    close(estimates.rewards, t["rewards"])
    close(estimates.raw_advantages, t["advantages_raw"])
    close(estimates.advantages, t["advantages"])
    close(estimates.returns, t["returns"])


def test_losses_equal_the_recorded_ones(finished):
    oracle, trainer, _, _ = finished
    t, steps = oracle.tensors, range(1, trainer.state.global_step + 1)
    for name, recorded in (
        ("loss", "loss"),
        ("value/loss", "vf_loss"),
        ("value/clip_fraction", "vf_clipfrac"),
        ("policy/clip_fraction", "pg_clipfrac"),
    ):
        close(logged(trainer, name), [t[f"step{n}/{recorded}"] for n in steps])
    policy_loss = torch.tensor(logged(trainer, "loss"), dtype=torch.float64)
    policy_loss -= trainer.args.vf_coef * torch.tensor(logged(trainer, "value/loss"))
    close(policy_loss, [t[f"step{n}/pg_loss"] for n in steps])


def test_policy_gradients_equal_the_recorded_ones(finished):
    oracle, trainer, recorder, _ = finished
    assert trainer.state.global_step == oracle.settings["ppo"]["num_ppo_epochs"]
    for n, grads in enumerate(recorder.grads, start=1):
        recorded = oracle.state(f"step{n}/grad/policy")
        assert grads.keys() == recorded.keys()
        for name, grad in recorded.items():
            close(grads[name], grad)


def test_weights_after_every_step_equal_the_recorded_ones(finished):
    oracle, _, recorder, models = finished
    value_names = [name for name, _ in models.value.named_parameters()]
    for n, after in enumerate(recorder.after, start=1):
        policy, value = (oracle.state(f"step{n}/after/{kind}") for kind in ("policy", "value"))
        for name, weight in policy.items():
            close(after[f"policy/{name}"], weight)
        for i, name in enumerate(value_names):
            close(after[f"critic/{i}"], value[name])
        assert len(after) == len(policy) + len(value)


def test_the_steps_are_large_against_the_tolerance(finished):
    """Otherwise equal weights would say little."""
    _, _, recorder, _ = finished
    for step in range(len(recorder.after)):
        for part in ("policy", "critic"):
            largest = max(change.abs().max() for change in recorder.moved(part, step).values())
            assert largest > 10 * TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_parity_holds_over_micro_batches_and_without_attention_mask(name, tmp_path):
    """Four micro-batches of two make upstream's one mini-batch; padding is recognised by its id."""
    oracle = load_oracle(name)
    trainer, recorder, _ = run(oracle, tmp_path, accumulation=4, with_mask=False)
    last = trainer.state.global_step
    for weight_name, weight in oracle.state(f"step{last}/after/policy").items():
        close(recorder.after[-1][f"policy/{weight_name}"], weight)
    assert last == oracle.settings["ppo"]["num_ppo_epochs"]


def test_parity_is_lost_with_turn_level_ratios(tmp_path):
    """The comparison can fail: another variant moves the weights elsewhere in the second epoch."""
    oracle = load_oracle("two_epochs")
    _, recorder, _ = run(oracle, tmp_path, variant="turn-ppo")
    expected = oracle.state("step2/after/policy")
    gap = max((recorder.after[-1][f"policy/{n}"] - w).abs().max() for n, w in expected.items())
    assert gap > 10 * TOLERANCE
