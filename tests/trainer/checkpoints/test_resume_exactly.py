"""A run that is resumed from any of its checkpoints ends bit for bit as the one that never stopped."""

import pytest
import torch
from peft import LoraConfig

from tests.kit.fakes import char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import assert_same_run, numbered_rows, scripted_trainer
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.trace import read_trace

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.1}
RUN = {
    "trainer_class": STPPOTrainer,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "critic_learning_rate": 2e-2,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "rows": 16,
    "shuffle_dataset": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 1,
}
# Each makes something matter that a checkpoint could forget.
CASES = {
    "separate critic": {},
    "shared critic, dropout": {
        "lora": True,
        "disable_dropout": False,
        "stabilizers": ["share"],
        "critic_warmup_steps": 4,
    },
    "log seldom": {"logging_steps": 5, "beta": 0.1, "log_completions": True},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 3, "kl_coef": 0.3},
    "fewer rows than a rollout batch": {"rows": 5},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4, "eval_rows": 6},
    "step that follows the KL": {"stabilizers": ["trust_region", "share"], "desired_kl": 1e-9},
}


def build(case: str, folder, **more) -> STPPOTrainer:
    """The same trainer again and again."""
    options = {**RUN, **CASES[case], **more}
    tokenizer = char_tokenizer()
    options["model"] = tiny_policy(tokenizer)
    if options.pop("lora", False):
        options["peft_config"] = LoraConfig(**LORA)
    else:
        options["value_model"] = tiny_value_model(tokenizer)
    if "eval_rows" in options:
        options["eval_dataset"] = numbered_rows(options.pop("eval_rows"))
    torch.manual_seed(3)
    trainer, recorder = scripted_trainer(folder, **options)
    trainer.remove_callback(recorder)
    return trainer


# Rollout batches end at 4, 8 and 12, the epoch at 8.
NOW = [("shared critic, dropout", step) for step in (4, 8)]
SLOW = [(case, step) for case in CASES for step in (4, 8)] + [("separate critic", 12)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Gives the folder, trainer and result of a case, training it when it is first asked for."""
    runs = {}

    def run_of(case):
        if case not in runs:
            folder = tmp_path_factory.mktemp("run")
            trainer = build(case, folder)
            runs[case] = folder, trainer, trainer.train()
        return runs[case]

    return run_of


@pytest.mark.parametrize(("case", "step"), quick([*NOW, *SLOW], *NOW))
def test_every_checkpoint_continues_bit_for_bit(case, step, uninterrupted):
    folder, reference, result = uninterrupted(case)
    resumed = build(case, folder, save_strategy="no")
    again = resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == reference.state.global_step == 12
    assert_same_run(resumed, reference)
    assert again.training_loss == result.training_loss


def stream_run(folder, **more):
    rows = numbered_rows(16).to_iterable_dataset()
    settings = {**RUN, "num_mini_batches": 1, "max_steps": 14, "save_total_limit": None}
    return scripted_trainer(folder, **{**settings, "train_dataset": rows, **more})[0]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """Sixteen rows are two rollout batches: three passes and a half, each in an order of its own."""
    folder = tmp_path_factory.mktemp("stream")
    trainer = stream_run(folder)
    trainer.train()
    return folder, trainer


@pytest.mark.long
@pytest.mark.parametrize("step", quick([2, 4, 6, 8, 12], 4, 8))
def test_a_stream_goes_on_in_the_pass_that_it_was_in(step, streamed):
    folder, reference = streamed
    resumed = stream_run(folder, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert_same_run(resumed, reference)


@pytest.mark.long
def test_too_few_rows_are_repeated_equally_often(uninterrupted):
    _, trainer, _ = uninterrupted("fewer rows than a rollout batch")
    assert sorted(trainer.train_dataset["prompt"]) == sorted("01234" * 2)
    assert trainer.state.epoch == 3.0, "an epoch is a rollout batch"


@pytest.mark.long
def test_a_new_run_of_the_same_trainer_starts_over(tmp_path):
    """`_step` and the buffer of a run that ended inside an update are gone."""
    (tmp_path / "notes.txt").write_text("no run")
    trainer = build("separate critic", tmp_path)
    trainer.args.max_steps = 3
    trainer.train()
    trainer.train()
    assert trainer._step == 6
    assert trainer.state.global_step == 3

    other = build("separate critic", tmp_path)
    other.args.max_steps = 1
    other.train()
    assert len((tmp_path / "metrics.previous.jsonl").read_text().splitlines()) == 5
    assert {e.update.first_step for e in read_trace(tmp_path)} == {0}


@pytest.mark.long
def test_what_is_due_inside_an_update_is_made_at_its_end(tmp_path):
    trainer = build("evaluation", tmp_path, save_steps=3, eval_steps=2, save_total_limit=None)
    trainer.train()
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    evaluated = [e["step"] for e in trainer.state.log_history if "eval_episode/score" in e]
    assert saved == evaluated == [4, 8, 12]


@pytest.mark.long
def test_a_longer_run_goes_on_from_an_end_inside_an_update_with_a_rollout(tmp_path):
    build("separate critic", tmp_path, max_steps=6, save_steps=100).train()
    longer = build("separate critic", tmp_path)
    played, rollout = [], longer._loop.rollout
    longer._loop.rollout = lambda rows: played.append(longer.state.global_step) or rollout(rows)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert played == [6, 10]
    assert longer.state.global_step == 12
