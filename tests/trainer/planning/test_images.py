"""Images are refused, wherever they come from: nothing here would show them to the model."""

import pytest
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from tests.kit.builders import build, prompts
from tests.kit.fakes import save_llava
from trl_stppo import STGRPOTrainer, STPPOTrainer
from trl_stppo.models.small import tiny_tokenizer

REFUSED = "images are not supported"


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A model for images and text, with its processor, on disk."""
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder, tiny_tokenizer(["say what you see "] * 4, markers=["<image>"]))
    return str(folder)


def test_a_model_with_a_processor(llava, tmp_path, monkeypatch):
    model = LlavaForConditionalGeneration.from_pretrained(llava)
    loaded = []
    monkeypatch.setattr(type(model), "from_pretrained", lambda *a, **k: loaded.append(a))
    given = LlavaProcessor.from_pretrained(llava)
    for named, processor in ((llava, None), (model, None), (model, given)):
        arguments = {"model": named, "processing_class": processor}
        with pytest.raises(ValueError, match=f"LlavaProcessor: {REFUSED}.*AutoTokenizer"):
            build(tmp_path, STPPOTrainer, arguments=arguments)
    assert not loaded


@pytest.mark.parametrize(
    ("trainer_class", "column"), [(STPPOTrainer, "images"), (STGRPOTrainer, "image")]
)
def test_rows_with_images(tmp_path, trainer_class, column):
    rows = prompts(8, **{column: ["a.png"] * 8})
    for name, data in {"train_dataset": rows, "eval_dataset": {"hard": rows}}.items():
        with pytest.raises(ValueError, match=f"`{name}.* `{column}`.*{REFUSED}"):
            build(tmp_path, trainer_class, arguments={name: data})
