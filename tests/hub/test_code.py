"""No code of a repository is run unless the caller says so, and nobody is asked either."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from trl import ModelConfig

from tests.hub.hub_kit import saved_base
from tests.hub.hub_server import Repo
from tests.kit.builders import build, quick_config
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo import Agent
from trl_stppo.cli.evaluate import load_agent
from trl_stppo.hub.loading import load_tokenizer, policy_folder
from trl_stppo.models.critic_models import critic_from_checkpoint
from trl_stppo.trainer.setup import models as setup_models

CODE = """
import pathlib
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers import PreTrainedTokenizerFast

pathlib.Path({marker!r}).touch()


class Config(Qwen2Config):
    model_type = "own"


class Policy(Qwen2ForCausalLM):
    config_class = Config


class Score(Qwen2ForSequenceClassification):
    config_class = Config


class Letters(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code was run"


@pytest.fixture
def coded(tmp_path, marker, monkeypatch):
    """A model with a type, classes and a tokenizer of its own; whoever is asked says yes."""
    folder = tmp_path / "coded"
    saved_base(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Policy",
        "AutoModelForSequenceClassification": "own.Score",
    }
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    file = folder / "tokenizer_config.json"
    tokenizer = {**json.loads(file.read_text()), "tokenizer_class": "Letters"}
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "own.Letters"]}
    file.write_text(json.dumps(tokenizer))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return str(folder)


@pytest.fixture
def adapter(tmp_path, coded):
    """An adapter that belongs on that model."""
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(tiny_policy(char_tokenizer()), lora)
    model.peft_config["default"].base_model_name_or_path = coded
    model.save_pretrained(tmp_path / "lora")
    return str(tmp_path / "lora")


# What a name, or an adapter, is loaded by; `c` is a configuration.
LOADS = {
    "agent": lambda name, lora, c: Agent.from_pretrained(name),
    "agent, adapter": lambda name, lora, c: Agent.from_pretrained(lora),
    "tokenizer": lambda name, lora, c: load_tokenizer(name),
    "tokenizer, adapter": lambda name, lora, c: load_tokenizer(lora),
    "critic": lambda name, lora, c: critic_from_checkpoint(name, **setup_models.loading_options(c)),
    "policy to go on with": lambda name, lora, c: setup_models.policy_to_go_on_with(lora, None, c, None),
    "reward model": lambda name, lora, c: build(c.output_dir, arguments={"reward_funcs": [name]}),
    "turn reward model": lambda name, lora, c: build(c.output_dir, arguments={"turn_reward_funcs": [name]}),
    "evaluated adapter": lambda name, lora, c: load_agent(Path(lora), c, ModelConfig(), {}),
}


@pytest.mark.parametrize("load", list(LOADS))
def test_code_is_not_run_and_nobody_is_asked(load, coded, adapter, marker, tmp_path):
    with pytest.raises((ValueError, OSError)):
        LOADS[load](coded, adapter, quick_config(tmp_path / "run"))
    assert not marker.exists()


def test_the_caller_can_say_so(coded, adapter, marker, tmp_path):
    trusting = {"trust_remote_code": True}
    agent = Agent.from_pretrained(coded, model_init_kwargs=trusting)
    assert type(agent.model).__name__ == "Policy"
    assert type(agent.tokenizer).__name__ == "Letters"
    assert marker.exists()
    args = quick_config(tmp_path / "run", trust_remote_code=True)
    assert setup_models.loading_options(args) == trusting
    _, tokenizer, _ = setup_models.policy_to_go_on_with(adapter, None, args, None)
    assert type(tokenizer).__name__ == "Letters"
    kept = quick_config(tmp_path / "run", model_init_kwargs=trusting)
    assert setup_models.loading_options(kept) == trusting


def test_python_files_are_fetched_on_request_templates_always_other_folders_never(hub, coded):
    files = {path.name: path.read_bytes() for path in Path(coded).iterdir()}
    files["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    for folder in ("critic", "adapter", "checkpoint-3"):
        files[f"{folder}/config.json"] = b"{}"
    hub.repos["me/coded"] = Repo()
    hub.repos["me/coded"].commit(files, "first")
    folder = policy_folder("me/coded")
    assert not (folder / "own.py").exists()
    assert (folder / "additional_chat_templates" / "tool_use.jinja").exists()
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["additional_chat_templates"]
    assert (policy_folder("me/coded", code=True) / "own.py").exists()
