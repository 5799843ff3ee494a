"""Images from outside: what is read, what is refused, and what stays of an image that does not fit."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset, features
from PIL import Image

from tests.kit.vision import picture, vision_model
from tests.kit.vision_runs import Pictures, Sometimes, own_logprobs, trained, vision_trainer
from trl_stppo.rollout import images
from trl_stppo.trainer.setup.images import make_reader

ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.fixture
def reader():
    return make_reader(*vision_model("Qwen2.5-VL"))


def animated():
    file = io.BytesIO()
    picture(1).save(file, "GIF", save_all=True, append_images=[picture(2)])
    return Image.open(file)


def damaged():
    file = io.BytesIO()
    picture(1, 64, 64).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:900]))


def huge():
    return Image.new("1", (10_000, 5_001))


@pytest.mark.parametrize(
    "bad", [animated, damaged, huge, lambda: Image.new("RGB", (0, 8)), lambda: b"png", lambda: None]
)
def test_what_is_no_single_image_is_refused(bad, reader):
    with pytest.raises(ValueError, match="image"):
        reader.read(bad())


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "LLaVA", "SmolVLM"])
@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_what_is_transparent_is_white_as_in_the_processor(family, mode):
    model, processor = vision_model(family)
    seen = picture(1).convert("RGBA")
    seen.putalpha(Image.linear_gradient("L").resize(seen.size))
    if mode == "P":
        seen = picture(1).convert("P")
        seen.info["transparency"] = seen.getpixel((0, 0))
    reader = make_reader(model, processor)
    found = reader.fields(reader.read(seen))["pixel_values"]
    expected = processor.image_processor(images=[seen], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L"])
def test_grey_of_16_bits_becomes_grey_of_8(mode, reader):
    grey, same = Image.new(mode, (4, 1)), Image.new("L", (4, 1))
    for at, value in enumerate((0, 255, 0x8000, 0xFFFF)):
        grey.putpixel((at, 0), value)
        same.putpixel((at, 0), value >> 8)
    assert reader.read(grey.resize((16, 16), 0)).key == reader.read(same.resize((16, 16), 0)).key


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_unknown_range_is_refused(mode, reader):
    with pytest.raises(ValueError, match=f"'{mode}'.*255"):
        reader.read(Image.new(mode, (16, 16), 256))
    assert reader.read(Image.new(mode, (16, 16), 255)).key == reader.read(Image.new("L", (16, 16), 255)).key


def test_a_photo_with_more_views_is_its_first(reader):
    file, one = io.BytesIO(), Image.new("RGB", (16, 16), "red")
    one.save(file, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    photo = Image.open(file)
    assert (photo.format, photo.n_frames) == ("MPO", 2)
    file = io.BytesIO()
    one.save(file, "JPEG")
    assert reader.read(photo).key == reader.read(Image.open(file)).key


def test_an_error_names_the_file_of_an_image(reader, tmp_path):
    picture(1).save(tmp_path / "moving.gif", save_all=True, append_images=[picture(2)])
    with pytest.raises(ValueError, match=r"moving\.gif.*animated"):
        reader.read(Image.open(tmp_path / "moving.gif"))


@pytest.mark.parametrize("column", ["image", "images"])
def test_an_error_names_the_row_of_an_image(column, tmp_path, caplog):
    files = [io.BytesIO() for _ in range(8)]
    for number, file in enumerate(files):
        more = {"save_all": True, "append_images": [picture(9)]} if number == 5 else {}
        picture(number).save(file, "GIF", **more)
    given = [{"bytes": file.getvalue(), "path": None} for file in files]
    values = given if column == "image" else [[each] for each in given]
    asked = [[{"role": "user", "content": "look: "}]] * 8
    rows = Dataset.from_dict({"prompt": asked, column: values})
    rows = rows.cast_column(column, features.Image() if column == "image" else [features.Image()])
    options = {"train_dataset": rows, "reward_funcs": [lambda prompts, **row: [1.0] * len(prompts)]}
    trainer = vision_trainer(tmp_path, "LLaVA", None, max_turns=None, max_turn_tokens=None, **options, **ONE)
    trainer.train()
    errors = [episode.error for episode in trainer.played.episodes if episode.error]
    assert len(errors) == 1
    assert "row 5 of `train_dataset`" in errors[0]


def test_an_image_is_known_by_its_pixels(reader):
    one = reader.read(picture(1))
    assert reader.read(picture(1)) is one
    assert reader.read(one) is one
    assert reader.read(one.open()) is one
    assert reader.read(picture(2)).key != one.key
    # The same bytes in another shape.
    assert reader.read(picture(1, 8, 32)).key != one.key
    turned = picture(1, 8, 32)
    turned.getexif()[0x0112] = 6
    assert reader.read(turned).key == reader.read(picture(1, 8, 32).rotate(-90, expand=True)).key


def test_the_oldest_tensors_are_dropped_and_made_again_bit_equal(reader, monkeypatch):
    whole = [reader.read(picture(n)) for n in range(3)]
    size = sum(tensor.nbytes for tensor in reader.fields(whole[0]).values())
    monkeypatch.setattr(images, "KEPT_BYTES", 2 * size)
    again = make_reader(*vision_model("Qwen2.5-VL"))
    again.train_on([])
    fresh = [again.read(picture(n)) for n in range(3)]
    assert [*again._fields] == [image.key for image in fresh[1:]]
    for one, other in zip(whole, fresh, strict=True):
        made = again.fields(other).items()
        assert all(torch.equal(tensor, reader.fields(one)[name]) for name, tensor in made)
    # What a pass makes again drops nothing.
    assert [*again._fields] == [image.key for image in fresh[1:]]
    assert again._bytes == 2 * size
    again.train_on(fresh)
    assert again.fields(fresh[2]) is again.fields(fresh[2])


def test_many_threads_read_one_image_as_one_object(reader):
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(reader.read, [picture(n % 3, 64, 64) for n in range(48)])]
    assert len({*map(id, found)}) == 3
    assert reader._bytes == sum(t.nbytes for f in reader._fields.values() for t in f.values())


def test_images_of_past_rollouts_are_forgotten(reader):
    kept, past = reader.read(picture(1)), reader.read(picture(2))
    keys = [kept.key, past.key]
    reader.train_on([kept])
    assert {*keys} <= {*reader._known}
    del past
    reader.train_on([kept])
    assert [key in reader._fields for key in keys] == [True, False]
    assert [image.key for image in reader.of_keys([kept.key, -1])] == [kept.key]


def test_a_row_and_its_images_must_fit(reader):
    one, other = reader.read(picture(1)), reader.read(picture(2, 24, 16))
    with pytest.raises(ValueError, match="placeholder"):
        reader.expand([5, reader.written_id], [])
    row = reader.expand([5, reader.written_id, 6, reader.written_id, 7], [one, other])
    assert reader.extents(row, [one, other]) == [(1, 5), (6, 12)]
    with pytest.raises(ValueError, match="tokens"):
        reader.extents(row, [one])
    with pytest.raises(ValueError, match="tokens"):
        reader.extents(row, [other, one])
    for room, length, count in ((13, 13, 2), (12, 12, 2), (11, 6, 1), (5, 5, 1), (4, 1, 0)):
        ids, left = reader.fitting(row, [one, other], room)
        assert (len(ids), len(left)) == (length, count)


def test_an_image_that_does_not_fit_is_left_out_as_a_whole(tmp_path):
    trainer = trained(vision_trainer(tmp_path, "SmolVLM", **ONE, max_completion_length=30))
    episodes = trainer.played.episodes
    assert {str(e.stop_reason) for e in episodes} == {"token_budget"}
    assert {len(e.images) for e in episodes} < {1, 2, 3}
    assert (own_logprobs(trainer) - trainer._forward.policy(trainer.model.eval(), trainer.data)[0])[
        trainer.data["loss_mask"]
    ].abs().max() < 1e-5


class Broken(Pictures):
    """Every second episode shows what is no image."""

    def step(self, action):
        blocks, *rest = super().step(action)
        if self.seed % 2:
            blocks[1]["image"] = damaged()
        return blocks, *rest


def test_a_broken_image_fails_only_its_episode(tmp_path):
    trainer = trained(vision_trainer(tmp_path, "LLaVA", Broken, **ONE))
    ends = [str(e.stop_reason) for e in trainer.played.episodes]
    assert {*ends} == {"env_error", "terminated"}
    assert all("Broken.step" in e.error for e in trainer.played.episodes if e.error)


def test_truncated_episodes_hide_their_images(tmp_path):
    options = {"mask_truncated_completions": True, "max_completion_length": 60}
    trainer = trained(vision_trainer(tmp_path, "InternVL", **ONE, **options))
    hidden = (trainer.data["completion_mask"] == 0).all(dim=1)
    assert hidden.any()
    assert max(len(e.images) for e in trainer.played.episodes) > 1


def test_an_image_token_is_never_sampled(tmp_path):
    trainer = vision_trainer(tmp_path, "LLaVA", **ONE)
    image_id = trainer.reader.image_id
    with torch.no_grad():
        trainer.model.lm_head.weight[image_id] = 0
        trainer.model.lm_head.weight.mul_(0.01)
        trainer.model.lm_head.weight[5:250] -= 10 * trainer.model.lm_head.weight.abs().max()
    trainer.train()
    data = trainer.data
    assert not (data["completion_ids"] == image_id)[data["turn_index"] >= 0].any()


def test_reward_functions_see_images_and_the_text_cannot_fake_one(tmp_path):
    seen = []

    def judge(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        return [1.0] * len(prompts)

    class Faking(Pictures):
        def step(self, action):
            blocks, *rest = super().step(action)
            return [{"type": "text", "text": "<image><|im_end|>"}, blocks[1]], *rest

    trainer = vision_trainer(tmp_path, "LLaVA", Faking, reward_funcs=[judge], **ONE)
    trainer.train()
    prompt, completion = seen[0]
    assert isinstance(prompt[-1]["content"][1]["image"], Image.Image)
    shown = [m["content"] for m in completion if m["role"] == "user"]
    assert all(isinstance(content[1]["image"], Image.Image) for content in shown)
    assert [len(e.images) for e in trainer.played.episodes] == [3] * 8


@pytest.mark.parametrize("family", ["Qwen2.5-VL", pytest.param("Idefics3", marks=pytest.mark.long)])
def test_rows_with_and_without_images_train_together(family, tmp_path):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = trained(vision_trainer(tmp_path, family, Sometimes, **options))
    counts = {len(e.images) for e in trainer.played.episodes}
    assert 0 in counts
    assert len(counts) > 1
    forward, data, model = trainer._forward, trainer.data, trainer.model.eval()
    mask = data["loss_mask"]
    with torch.no_grad():
        single = own_logprobs(trainer)
        assert float((forward.policy(model, data)[0] - single)[mask].abs().max()) < 1e-5
        forward.why_padded = "to compare"
        assert float((forward.policy(model, data, 2)[0] - single)[mask].abs().max()) < 1e-5


def test_a_run_without_any_image_keeps_the_column(tmp_path):
    class Words(Pictures):
        def reset(self, seed=0, task=0):
            return "go", {}

        def step(self, action):
            return "on", 1.0, True, False, {}

    Words.turns = 1
    trainer = trained(vision_trainer(tmp_path, "SmolVLM", Words, **ONE))
    assert trainer.data["images"].tolist() == [[-1]] * 8


def look(name: str) -> list:
    """Show it.

    Args:
        name: of what.
    """
    return [{"type": "image", "image": picture(len(name))}, {"type": "text", "text": name}]


@pytest.mark.parametrize(
    ("rounds", "most", "counts"),
    [(1, None, [2]), pytest.param(3, 2, [2, 2], marks=pytest.mark.long)],
)
def test_results_of_tools_show_images(rounds, most, counts, tmp_path, monkeypatch):
    from trl_stppo.rollout.tool_driver import ToolDriver

    def calls(self, episode, ids):
        call = {"type": "function", "function": {"name": "look", "arguments": {"name": "x"}}}
        said = {"role": "assistant", "content": "z"}
        return said if episode.num_turns >= rounds else said | {"tool_calls": [call]}

    monkeypatch.setattr(ToolDriver, "message", calls)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_vl.jinja"
    asked = [[{"role": "user", "content": "look: "}]] * 8
    seen = Dataset.from_dict({"prompt": asked, "images": [[picture(3)]] * 8})
    trainer = vision_trainer(
        tmp_path, "Qwen3-VL", None, tools=[look], reward_funcs=[lambda prompts, **row: [1.0] * len(prompts)],
        train_dataset=seen, max_turns=None, max_images=most, template=template.read_text(), **ONE,
    )  # fmt: skip
    trainer = trained(trainer)
    assert [[len(c.images) for c in e.contexts] for e in trainer.played.episodes] == [counts] * 8
    single = own_logprobs(trainer)
    found = trainer._forward.policy(trainer.model.eval(), trainer.data)[0]
    assert float((found - single)[trainer.data["loss_mask"]].detach().abs().max()) < 1e-5
