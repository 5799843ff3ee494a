"""What a training records is what it computed, and recording leaves no trace in the training."""

import math
import re

import pytest
import torch

from tests.kit.builders import LIMITS, TEXT, build, prompts
from tests.kit.fakes import char_tokenizer, float64_policy
from tests.kit.launch import on_two_processes
from tests.kit.run_log import comparable
from tests.kit.scripted import (
    EPISODES,
    Float64Trainer,
    plain_logprobs,
    scripted_trainer,
    train,
)
from tests.kit.trace_run import run
from trl_stppo import STGRPOTrainer
from trl_stppo.trace import read_trace
from trl_stppo.trainer.batch import full_sequence
from trl_stppo.trainer.training_loop import TrainingLoop

# Two micro-batches for each of two mini-batches, two epochs: four steps per update.
UPDATE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 4}
UPDATE |= {"variant": "st-ppo", "num_mini_batches": 2, "num_ppo_epochs": 2}
UPDATE |= {"advantage_level": "token", "cliprange": 0.2}
UPDATE["staleness"] = 0.0


class StaleLoop(TrainingLoop):
    """Another policy seems to have played, so that tokens are clipped from the first step on."""

    def rollout(self, rows):
        self.numbers = [int(columns["prompt"]) for columns in rows]
        return super().rollout(rows)

    def old_logprobs(self, tokens):
        old = super().old_logprobs(tokens)
        for row, number in enumerate(self.numbers):
            draw = torch.Generator().manual_seed(number)
            old[row] += 0.6 * torch.randn(old.size(1), generator=draw, dtype=old.dtype)
        return old


class StaleTrainer(Float64Trainer):
    loop_class = StaleLoop


UPDATE["trainer_class"] = StaleTrainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer, recorder = train(folder, **UPDATE)
    return trainer, recorder, {e.row: e for e in read_trace(folder)}


def policy_at(recorder, step: int):
    """The policy with the weights that optimizer step `step` (from 0) starts with."""
    model = float64_policy(char_tokenizer()).eval()
    old = recorder.after[step - 1] if step else recorder.before
    named = {n.removeprefix("policy/"): w for n, w in old.items() if n.startswith("policy/")}
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    return model


def known(values) -> list[float]:
    return [value for value in values if value is not None]


def test_ratios_are_those_of_the_last_pass_over_each_row(trained):
    """Computed anew: each row in the mini-batch of the second epoch that it was dealt into."""
    _, recorder, episodes = trained
    assert len(episodes) == EPISODES
    seen, clipped = set(), 0
    for step in (2, 3):
        batch = recorder.batches[step]
        ids, mask, length = full_sequence(batch)
        with torch.no_grad():
            new, _ = plain_logprobs(policy_at(recorder, step), ids, mask, length)
        for place in range(4 * (step - 2), 4 * (step - 1)):
            prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
            (episode,) = [e for e in episodes.values() if e.token_ids[: len(prompt)] == prompt]
            seen.add(episode.row)
            difference = (new[place] - batch["old_per_token_logps"][place]).tolist()
            for start, end in episode.turn_spans:
                ratios = difference[start:end]
                assert episode.token_log_ratio[start:end] == pytest.approx(ratios, rel=2e-5)
                turn = sum(ratios) / len(ratios)
                assert episode.log_ratio[start:end] == pytest.approx([turn] * len(ratios), rel=2e-5)
                for i in range(start, end):
                    advantage, ratio = batch["advantages"][place][i], math.exp(turn)
                    stopped = ratio > 1.2 if advantage > 0 else ratio < 0.8
                    assert episode.clipped[i] == stopped
                    clipped += stopped
    assert seen == set(range(EPISODES))
    assert clipped > 5, "the case should be interesting"


def test_ratios_are_to_the_first_pass_if_that_gives_the_old_logprobs(tmp_path):
    """Without a KL and with one mini-batch the rollout has no old log-probabilities."""
    options = {"num_mini_batches": 1, "num_ppo_epochs": 3, "max_steps": 3, "kl_coef": 0.0}

    def varied(completions, **_):
        return [float(sum(map(ord, str(text))) % 7) for text in completions]

    trainer = build(tmp_path, arguments={"reward_funcs": varied}, learning_rate=1e-2, **options)
    trainer.train()
    moved = 0.0
    for episode in read_trace(tmp_path):
        for start, end in episode.turn_spans:
            ratios = episode.token_log_ratio[start:end]
            assert episode.log_ratio[start:end] == pytest.approx(ratios, abs=1e-5)
            moved = max(moved, *map(abs, ratios))
    assert moved > 1e-3, "the case should be interesting"


def test_other_figures_are_those_of_the_batch(trained):
    trainer, recorder, episodes = trained
    batch = recorder.batches[0]
    for place in range(EPISODES):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
        length = int(batch["completion_mask"][place].sum())
        ids = prompt + batch["completion_ids"][place][:length].tolist()
        (episode,) = [e for e in episodes.values() if e.token_ids == ids]
        turns = batch["turn_index"][place][:length]
        assert episode.loss_mask == (turns >= 0).tolist()
        for name, column in (
            ("old_logprobs", "old_per_token_logps"), ("advantages", "advantages"),
            ("values", "values"), ("returns", "returns"),
        ):  # fmt: skip
            values = batch[column][place][:length][turns >= 0].tolist()
            read = known(getattr(episode, name))
            assert read == pytest.approx(values, rel=1e-5), name
            assert read == [float(f"{value:.6g}") for value in read], "six digits"
            assert [v is None for v in getattr(episode, name)] == (turns < 0).tolist()
        assert len(episode.turn_rewards) == len(episode.turn_spans) == int(turns.max()) + 1
        assert episode.score == pytest.approx(sum(episode.turn_rewards))
        assert episode.text == trainer._tokenizer.decode(ids)
        assert episode.steps == {"taken": 2}
    about = episode.update
    assert (about.update, about.steps, about.complete) == (1, {"taken": 4}, True)


def test_weights_are_the_same_bit_for_bit_without_it(trained, tmp_path):
    recording, recorder, _ = trained
    trainer, silent = train(tmp_path, **UPDATE, trace_episodes=0)
    for step, theirs in enumerate(silent.after):
        assert all(torch.equal(w, recorder.after[step][name]) for name, w in theirs.items())
    assert comparable(trainer.state.log_history) == comparable(recording.state.log_history)
    assert not (tmp_path / "trace").exists()


@pytest.mark.long
def test_a_resumed_run_records_as_if_it_had_never_stopped(tmp_path):
    options = {**UPDATE, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    options |= {"rows": 2 * EPISODES, "trace_episodes": 3}
    train(tmp_path / "one", **options)
    reference = [e.to_json() for e in read_trace(tmp_path / "one")]
    assert len(reference) == 6
    trainer, _ = scripted_trainer(tmp_path / "one", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    episodes = list(read_trace(tmp_path / "one"))
    assert [e.to_json() for e in episodes] == reference
    assert {e.update.first_step for e in episodes} == {0, 4}, "the second update is a new one"


def test_a_training_that_breaks_off_leaves_its_update(tmp_path):
    trainer, _ = scripted_trainer(tmp_path, **UPDATE)
    compute, calls = trainer._compute_loss, []

    def break_off(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(*args)

    trainer._compute_loss = break_off
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    episodes = list(read_trace(tmp_path))
    assert not episodes[0].update.complete
    assert episodes[0].update.steps == {"taken": 1}
    assert sum(e.log_ratio is not None and any(known(e.log_ratio)) for e in episodes) == 6


def test_environments_evaluations_and_no_critic(tmp_path):
    columns = {"answers": [["x", "y"]] * 3, "share": [0.5, math.nan, None], "text": ["a" * 500] * 3}
    trainer = build(
        tmp_path, STGRPOTrainer, **LIMITS, num_generations=4, max_steps=2, seed=3,
        num_mini_batches=1, trace_episodes=5, num_generations_eval=1,
        arguments={**TEXT, "eval_dataset": prompts(3, id=["a", "b", "c"], **columns)},
    )  # fmt: skip
    trainer.evaluate()
    trainer.train()
    held = [e for e in read_trace(tmp_path) if e.update.phase == "eval"]
    assert sorted((e.row, e.prompt_id) for e in held) == [(0, "a"), (1, "b"), (2, "c")]
    told = [e.columns for e in sorted(held, key=lambda e: e.row)]
    assert [columns.get("share") for columns in told] == [0.5, "nan", None]
    assert all(columns["answers"] == ["x", "y"] for columns in told)
    assert not any({"id", "prompt", "text"} & columns.keys() for columns in told)
    assert all(e.log_ratio is None and e.update.complete for e in held)
    played = [e for e in read_trace(tmp_path) if e.update.phase == "train"]
    assert [e.key for e in played] == [f"train-{u}-{r}" for u in (1, 2) for r in range(5)]
    for e in (*held, *played):
        about = (e.environment, e.stop_reason, e.observations)
        assert about == ("CountEnv", "terminated", "environment")
        assert (e.terminated, len(e.turn_rewards)) == (True, 2)
        assert e.success is not None
        assert [m["role"] for m in e.messages] == ["assistant", "user", "assistant"]
        said = ["".join(e.pieces[e.prompt_tokens :][a:b]) for a, b in e.turn_spans]
        spoken = [re.sub(r"<[\w|]+>", "", s) for s in said]
        assert spoken == [m["content"] for m in e.messages[::2]]
    assert all(e.values is None and e.returns is None and e.pictures is None for e in played)
    assert len({tuple(e.seed) for e in played}) == len(played)


@pytest.mark.slow
def test_two_processes_record_what_one_does(tmp_path):
    on_two_processes("tests.kit.trace_run", tmp_path)
    run(tmp_path / "one", 1)
    two = {e.row: e for e in read_trace(tmp_path / "two")}
    one = {e.row: e for e in read_trace(tmp_path / "one")}
    assert sorted(two) == [0, 1, 2, 4, 5]
    assert {e.update.process for e in two.values()} == {0, 1}
    for row in one.keys() & two.keys():
        mine, theirs = two[row], one[row]
        assert (mine.text, mine.turn_spans) == (theirs.text, theirs.turn_spans)
        for name in ("advantages", "values", "token_log_ratio", "log_ratio"):
            expected = pytest.approx(known(getattr(theirs, name)), rel=1e-4)
            assert known(getattr(mine, name)) == expected, name
