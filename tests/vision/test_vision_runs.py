"""Runs with images as a whole: resumed, ahead of the update, evaluated, recorded."""

import base64
import io
import re

import pytest
import torch
from datasets import Dataset
from PIL import Image

from tests.kit.vision import picture, vision_model
from tests.kit.vision_runs import Pictures, rows, trained, vision_trainer
from trl_stppo import Agent
from trl_stppo.hub.settings import AgentSettings
from trl_stppo.rollout import images
from trl_stppo.trace import read_trace
from trl_stppo.trainer import recorder
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
@pytest.mark.parametrize("of_rows", [False, True])
def test_rollouts_ahead_are_those_of_stale_policies(of_rows, tmp_path):
    own = [[picture(i)] for i in range(8)]
    seen = Dataset.from_dict({**rows().to_dict(), "images": own})
    options = {"train_dataset": seen} if of_rows else {}
    options |= {**SPLIT, "max_steps": 3}
    ends = [
        weights(trained(vision_trainer(tmp_path / name, "LLaVA", **options, **{name: value})))
        for name, value in (("rollout_overlap", True), ("rollout_staleness", 1))
    ]
    assert torch.equal(*ends)


def test_image_tokens_are_not_sampled_beside_others_and_the_sampler_stays_exact(tmp_path):
    options = {**SPLIT, "generation_kwargs": {"suppress_tokens": [65, 66]}}
    trainer = vision_trainer(tmp_path, "LLaVA", **options)
    settings, _ = trainer._player.sampler._settings()
    assert settings.suppress_tokens == [65, 66, trainer.reader.image_id]
    assert trainer._player.sampler.is_exact, "the watch of the sampler needs this"


@pytest.mark.parametrize("place", ["kwargs", "model"])
def test_an_agent_samples_no_suppressed_token(place):
    def first(model, **options):
        agent = Agent(model, processor, AgentSettings(**limits), **options)
        episode = agent.run(Pictures, rows(1)[0])
        return episode.ids[episode.turn_spans[0][0]]

    limits = {"max_turns": 1, "max_turn_tokens": 4, "max_completion_length": 200}
    model, processor = vision_model("LLaVA")
    token = first(model)
    if place == "model":
        model.generation_config.suppress_tokens = [token]
        assert first(model) != token
    else:
        assert first(model, generation_kwargs={"suppress_tokens": [token]}) != token


def test_an_evaluation_does_not_depend_on_its_batches(tmp_path):
    found = []
    for size in (4, 3):
        options = {**SPLIT, "per_device_eval_batch_size": size}
        trainer = vision_trainer(tmp_path / str(size), "LLaVA", **options)
        found.append(trainer.evaluate(rows(6))["eval_episode/score"])
    assert found[0] == found[1] != 0


def test_records_show_images_once_and_small(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "THUMBNAIL_SIDE", 12)
    vision_trainer(tmp_path, "LLaVA", **SPLIT, trace_episodes=8).train()
    for episode in read_trace(tmp_path):
        assert episode.messages[1]["content"] == "now [image 16x16, 16 tokens]"
        assert [len(urls) for urls in episode.images] == [1, 1, 1, 0]
        turns = [start + episode.prompt_tokens for start, _ in episode.turn_spans]
        for (start, end), url, size in zip(
            episode.image_spans,
            [url for urls in episode.images for url in urls],
            [(12, 8), (12, 12), (12, 8)],
            strict=True,
        ):
            told = episode.pieces[start:end]
            assert len({*episode.token_ids[start:end]}) == 1
            assert told[:-1] == [""] * 15
            assert re.fullmatch(r"\[image \d+x16, 16 tokens\]", told[-1])
            head, data = url.split(",")
            assert head == "data:image/jpeg;base64"
            assert Image.open(io.BytesIO(base64.b64decode(data))).size == size
        # Each image but the first stands between two turns.
        starts = [start for start, _ in episode.image_spans]
        assert starts[0] < turns[0] < starts[1] < turns[1] < starts[2] < turns[2]


def test_a_record_has_a_limit_of_images(tmp_path, monkeypatch):
    trainer = vision_trainer(tmp_path, "LLaVA", **SPLIT, trace_episodes=1)
    one = len(trainer.reader.read(picture(0, 24, 16)).thumbnail())
    monkeypatch.setattr(recorder, "MOST_IMAGE_CHARACTERS", one)
    trainer.train()
    (episode,) = read_trace(tmp_path)
    first, *others = [url for urls in episode.images for url in urls]
    assert first
    assert others == ["", ""]


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
