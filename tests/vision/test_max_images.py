"""More images than one context holds: the oldest leave it, and each turn trains as it was sampled."""

import copy
import json

import pytest
import torch

from tests.kit.vision import picture, vision_model
from tests.kit.vision_runs import Pictures, own_logprobs, own_table, trained, vision_trainer
from trl_stppo.rollout.images import images_of
from trl_stppo.trainer.setup.images import make_reader

ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
LIMITS = {"max_images": 4, "max_turns": 8}


class Long(Pictures):
    turns = 8


def test_the_oldest_images_are_cut_out_of_a_row():
    reader = make_reader(*vision_model("Qwen2.5-VL"))
    one, two, three = (reader.read(picture(n, 16, 8 + 8 * n)) for n in range(3))
    row = [5, *one.ids, 6, *two.ids, 7, 8, *three.ids]
    assert reader.without_oldest(row, [one, two, three], 0) == (row, [one, two, three])
    assert reader.without_oldest(row, [one, two, three], 2) == ([5, 6, 7, 8, *three.ids], [three])


@pytest.mark.parametrize("family", ["Qwen2.5-VL", pytest.param("SmolVLM", marks=pytest.mark.long)])
def test_turns_train_on_the_rows_on_which_they_were_sampled(family, tmp_path):
    trainer = trained(vision_trainer(tmp_path, family, Long, **LIMITS, **ONE))
    data, episodes = trainer.data, trainer.played.episodes
    # Images after each turn: 1 2 3 4, then 5 become 2 3 4, then again.
    counts = [[len(c.images) for c in e.contexts] for e in episodes]
    turns = [[c.turns for c in e.contexts] for e in episodes]
    assert counts == [[4, 4, 2]] * 8
    assert turns == [[[0, 1, 2, 3], [4, 5, 6], [7]]] * 8
    for before, after in zip(episodes[0].contexts, episodes[0].more, strict=False):
        assert after.images[:1] == before.images[-1:]
    gaps = data["sampling_per_token_logps"] - data["old_per_token_logps"]
    assert float(gaps[data["loss_mask"]].abs().max()) < 1e-5
    assert trainer.state.log_history[0]["contexts/rewritten"] == 2
    with torch.no_grad():
        single = own_logprobs(trainer)
        found = trainer._forward.policy(trainer.model.eval(), data)[0]
    assert float((found - single)[data["loss_mask"]].abs().max()) < 1e-5
    # The last turn on the row that holds all images.
    for number, episode in enumerate(episodes):
        whole = episode.prompt_ids + episode.completion_ids
        shown = images_of(episode.prompt) + images_of(episode.messages)
        table = own_table(trainer.model, trainer.reader, whole, shown)
        ids, ((start, end),) = episode.last.ids, episode.last.turn_spans
        at = len(whole) - len(ids) + start - 1
        uncut = table[torch.arange(at, at + end - start), torch.tensor(ids[start:end])]
        assert float((uncut - single[3 * number + 2, start:end]).abs().max()) > 0.05


@pytest.mark.long
@pytest.mark.parametrize("family", ["LLaVA", "Qwen3-VL"])
def test_a_step_is_the_same_over_any_split(family, tmp_path):
    whole, halves = (
        trained(vision_trainer(tmp_path / name, family, Long, **LIMITS, **split))
        for name, split in (("1", ONE), ("2", TWO))
    )
    largest = max(float(move.abs().max()) for move in whole.moved.values())
    gaps = [float((move - halves.moved[name]).abs().max()) for name, move in whole.moved.items()]
    assert max(gaps) < 1e-4 * largest
    largest = max(float(move.abs().max()) for move in whole.critic_moved)
    pairs = zip(whole.critic_moved, halves.critic_moved, strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-4 * largest


class Crowded(Pictures):
    """Shows two images at once in every second episode."""

    def step(self, action):
        blocks, *rest = super().step(action)
        return blocks + blocks[1:] * (self.seed % 2), *rest


def test_an_observation_of_too_many_images_fails_its_episode(tmp_path):
    trainer = trained(vision_trainer(tmp_path, "LLaVA", Crowded, max_images=1, **ONE))
    ends = {str(e.stop_reason): e for e in trainer.played.episodes}
    assert {*ends} == {"env_error", "terminated"}
    assert "`max_images`" in ends["env_error"].error
    assert [len(c.images) for c in ends["terminated"].contexts] == [1, 1, 1]
    trainer.save_model()
    assert json.loads((tmp_path / "agent.json").read_text())["max_images"] == 1


class Talking(Pictures):
    """Says much after its third image."""

    def step(self, action):
        blocks, *rest = super().step(action)
        return [*blocks, {"type": "text", "text": "x" * 300 * (self.count == 2)}], *rest


def value_after(trainer, critic, context):
    """The critic's value after a context's last token, by its own pass over the row."""
    row = torch.tensor([context.prompt_ids + context.ids])
    seen = trainer.reader.model_inputs(context.images, row)
    with torch.no_grad():
        return float(critic.values(row, torch.ones_like(row), 1, **seen)[0, -1])


@pytest.mark.parametrize("packs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_cut_observation_that_opens_a_context_is_the_last_state(packs, tmp_path):
    options = {"max_images": 2, "max_completion_length": 200, "bootstrap_truncated": True, **ONE}
    trainer = vision_trainer(tmp_path, "Qwen2.5-VL", Talking, **options)
    if not packs:
        trainer._forward.why_padded = "to compare"
    with torch.no_grad():
        trainer.critic.head.weight.normal_()
    critic = copy.deepcopy(trainer.critic)
    trainer = trained(trainer)
    episodes, final = trainer.played.episodes, trainer.estimates.passes.final_values
    assert {str(e.stop_reason) for e in episodes} == {"token_budget"}
    assert [[c.turns for c in e.contexts] for e in episodes] == [[[0, 1], []]] * 8
    for episode, value in zip(episodes, final.tolist(), strict=True):
        assert episode.last is episode.more[0]
        assert (len(episode.last.ids), len(episode.last.images)) == (200, 1)
        assert value == pytest.approx(value_after(trainer, critic, episode.last), abs=1e-5)
        assert abs(value - value_after(trainer, critic, episode)) > 1e-3


def test_a_cut_observation_that_opens_a_context_counts_as_truncated(tmp_path):
    options = {"max_images": 2, "max_completion_length": 200, "mask_truncated_completions": True}
    trainer = trained(vision_trainer(tmp_path, "LLaVA", Talking, **options, **ONE))
    assert not trainer.data["completion_mask"].any()
