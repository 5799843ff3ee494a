"""Names that can only be paths: without a file or folder they are refused, before a request to the Hub."""

import json
import socket

import huggingface_hub
import pytest
from datasets import Dataset

from tests.kit.builders import build, share_of_a
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.kit.script_kit import AGENT, ROOT
from trl_stppo import Agent
from trl_stppo.hub.loading import load_tokenizer
from trl_stppo.paths import check_name

PATHS = ("./a", "/a/b", "~/a", "a/b/c", "runs/a", "rows.jsonl", "a\\b", "a b", ".")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Nothing looks up an address."""
    asked = []

    def refuse(host, *args, **kwargs):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


@pytest.mark.parametrize("name", PATHS[:-1])
def test_paths_that_are_not_there_are_refused(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(FileNotFoundError) as caught:
        check_name("model", name)
    assert f"`model={name}`" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [None, 5, "gpt2", "Qwen/Qwen2.5-0.5B", "docs/of-an-owner", AGENT, "docs", PATHS[-1]],
)
def test_names_of_the_hub_and_paths_that_are_there_pass(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_name("model", name)


@pytest.mark.parametrize(("field", "value"), [
    ("model", "runs/none"),
    ("value_model", "runs/none"),
    ("reward_model", "runs/none"),
    ("reward_funcs[1]", [share_of_a, "runs/none"]),
    ("turn_reward_funcs[0]", "runs/none"),
])  # fmt: skip
def test_a_trainer_refuses_a_folder_that_is_not_there(tmp_path, field, value):
    arguments = {"environment_factory": CountEnv, field.partition("[")[0]: value}
    with pytest.raises(FileNotFoundError) as caught:
        build(tmp_path, arguments=arguments, max_turns=2)
    assert f"`{field}=runs/none`" in str(caught.value)


@pytest.mark.parametrize(("load", "field"), [
    (Agent.from_pretrained, "name_or_folder"),
    (load_tokenizer, "name"),
])  # fmt: skip
def test_so_do_agents_and_tokenizers(load, field):
    with pytest.raises(FileNotFoundError) as caught:
        load("runs/none")
    assert f"`{field}=runs/none`" in str(caught.value)


def test_so_does_an_adapter_whose_base_is_a_folder_that_is_not_there(tmp_path):
    about = {"base_model_name_or_path": "runs/none", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    rows = Dataset.from_list([{"prompt": "a"}] * 8)
    arguments = {
        "model": str(tmp_path),
        "train_dataset": rows,
        "processing_class": char_tokenizer(),
    }
    with pytest.raises(FileNotFoundError, match="base_model_name_or_path=runs/none"):
        build(tmp_path / "out", arguments=arguments)
    with pytest.raises(ValueError, match="base_model_name_or_path=runs/none"):
        Agent.from_pretrained(str(tmp_path))
    tiny_policy(char_tokenizer()).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="base_model=runs/other"):
        Agent.from_pretrained(str(tmp_path), base_model="runs/other")
