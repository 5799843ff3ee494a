"""Images where the policy, or a setting, does not read them: an error by name, before a model is loaded."""

from pathlib import Path

import pytest
import trl
from PIL import Image

from tests.kit.builders import build, prompts
from tests.kit.vision_runs import vision_trainer
from trl_stppo import STGRPOTrainer, STPPOTrainer

PICTURE = Image.new("RGB", (8, 8))
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.mark.parametrize(
    ("trainer_class", "column", "value"),
    [(STPPOTrainer, "images", [PICTURE]), (STGRPOTrainer, "image", PICTURE)],
)
def test_rows_with_images_need_a_processor(tmp_path, trainer_class, column, value):
    rows = prompts(8, **{column: [value] * 8})
    for name, data in {"train_dataset": rows, "eval_dataset": {"hard": rows}}.items():
        with pytest.raises(ValueError, match=f"`{column}` of `{name}.*processing_class"):
            build(tmp_path, trainer_class, arguments={name: data})


def test_blocks_of_prompts_need_a_processor(tmp_path):
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    rows = prompts(8).map(lambda row: {"prompt": [{"role": "user", "content": content}]})
    with pytest.raises(ValueError, match=r"`prompt` of `train_dataset`.*processing_class"):
        build(tmp_path, arguments={"train_dataset": rows})


def test_images_beside_a_prompt_of_text_are_refused(tmp_path):
    rows = prompts(8, images=[[PICTURE]] * 8).map(lambda row: {"prompt": "what is it?"})
    options = {"train_dataset": rows, "reward_funcs": [len_of], "max_turns": None}
    trainer = vision_trainer(tmp_path, "LLaVA", None, **options, max_turn_tokens=None)
    with pytest.raises(ValueError, match=r"`prompt`.*messages"):
        trainer.train()


def len_of(completions, **columns):
    return [0.0] * len(completions)


def judge():
    from tests.kit.fakes import char_tokenizer, tiny_value_model

    return tiny_value_model(char_tokenizer())


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("use_vllm", {"use_vllm": True}),
        ("reward model", {"reward_funcs": [judge()]}),
    ],
)
def test_what_does_not_go_with_images_is_refused(named, options, tmp_path):
    with pytest.raises(ValueError, match=f"processing_class.*{named}"):
        vision_trainer(tmp_path, "LLaVA", **options)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("<image>", ""), "fails|drops"),
        (lambda text: text.replace("<image>", "<image><image>"), "placeholders|fails"),
        (lambda text: text.replace("{% for m in messages %}", "{% for m in messages[:1] %}"), "leaves|later"),
    ],
)  # fmt: skip
def test_a_template_that_drops_or_repeats_images_is_refused(change, why, tmp_path, monkeypatch):
    from tests.kit import vision

    original = vision.CHATML
    monkeypatch.setattr(vision, "CHATML", change(original.replace("IMAGE", "<image>")))
    with pytest.raises(ValueError, match=f"chat template.*({why})"):
        vision_trainer(tmp_path, "LLaVA")


def look(name):
    """Show it.

    Args:
        name: of what.
    """
    return PICTURE


def read(name):
    """Read it.

    Args:
        name: of what.
    """
    return name


look.__annotations__ = {"name": str, "return": list}
read.__annotations__ = {"name": str, "return": str}


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3"])
def test_a_template_that_drops_only_the_images_of_tools_is_refused(name, tmp_path):
    options = {"max_turns": None, "train_dataset": prompts(8), "reward_funcs": [len_of]}
    template = (TEMPLATES / f"{name}.jinja").read_text()
    with pytest.raises(ValueError, match=r"chat template.*tools.*'look'"):
        vision_trainer(tmp_path, "Gemma 4", None, tools=[read, look], template=template, **options)
    # A tool that returns only text shows none.
    vision_trainer(tmp_path, "Gemma 4", None, tools=[read], template=template, **options)


@pytest.mark.parametrize("name", ["gemma4_v2", "gemma4_v4"])
def test_a_template_that_writes_images_of_tools_passes(name, tmp_path):
    options = {"max_turns": None, "train_dataset": prompts(8), "reward_funcs": [len_of], "tools": [look]}
    template = (TEMPLATES / f"{name}.jinja").read_text()
    vision_trainer(tmp_path, "Gemma 4", None, template=template, **options)


def test_a_row_that_numbers_images_anew_is_refused(tmp_path):
    renderer = vision_trainer(tmp_path, "LLaVA")._player.renderer
    with pytest.raises(ValueError, match="`chat_template_kwargs` has add_vision_id=True"):
        renderer.for_row({"chat_template_kwargs": {"add_vision_id": True}})
    assert renderer.for_row({"chat_template_kwargs": {"add_vision_id": None}}) is renderer
