"""Runs with images as a whole: resumed, ahead of the update, evaluated, recorded."""

import gzip
import json

import pytest
import torch

from tests.kit.vision_runs import rows, trained, vision_trainer
from trl_stppo.trainer.loop.forward import ForwardPasses

SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.long
def test_a_resumed_run_ends_bit_equal(tmp_path):
    options = {**SPLIT, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(vision_trainer(tmp_path, "LLaVA", **options))
    again = vision_trainer(tmp_path, "LLaVA", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again))
    # The processor lies beside the policy.
    assert (tmp_path / "checkpoint-2" / "processor_config.json").is_file()


@pytest.mark.long
def test_rollouts_ahead_are_those_of_stale_policies(tmp_path):
    ends = [
        weights(trained(vision_trainer(tmp_path / name, "LLaVA", **SPLIT, max_steps=3, **{name: value})))
        for name, value in (("rollout_overlap", True), ("rollout_staleness", 1))
    ]  # fmt: skip
    assert torch.equal(*ends)


def test_an_evaluation_does_not_depend_on_its_batches(tmp_path):
    found = []
    for size in (4, 3):
        options = {**SPLIT, "per_device_eval_batch_size": size}
        trainer = vision_trainer(tmp_path / str(size), "LLaVA", **options)
        found.append(trainer.evaluate(rows(6))["eval_episode/score"])
    assert found[0] == found[1] != 0


def test_records_name_images_by_their_size(tmp_path):
    trainer = vision_trainer(tmp_path, "LLaVA", **SPLIT, trace_episodes=8)
    trainer.train()
    (file,) = tmp_path.rglob("*.jsonl.gz")
    with gzip.open(file, "rt") as lines:
        records = [json.loads(line) for line in lines]
    shown = [record["messages"][1]["content"] for record in records if record.get("messages")]
    assert {*shown} == {"now [image of 16 tokens]"}


def test_an_override_gets_images_by_upstreams_names(tmp_path):
    from tests.kit.vision_runs import KeepingTrainer

    seen = []

    class Own(KeepingTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            seen.append(set(kwargs))
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    for family in ("Idefics3", "InternVL", "Qwen2.5-VL"):
        trainer = trained(vision_trainer(tmp_path / family, family, **SPLIT, trainer_class=Own))
        assert {"pixel_values", "num_images"} < seen[-1]
        data, forward, model = trainer.data, trainer._forward, trainer.model.eval()
        with torch.no_grad():
            theirs = forward.policy(model, data, 3)[0]
            forward.own_hook = Own._get_per_token_logps_and_entropies
            ours = ForwardPasses.policy(forward, model, data, 3)[0]
        mask = data["loss_mask"]
        assert float((theirs - ours)[mask].abs().max()) < 1e-5
