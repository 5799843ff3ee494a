"""Names that can only be paths: without a file or folder they are refused, before a request to the Hub."""

import socket

import huggingface_hub
import pytest

from tests.kit.builders import build, share_of_a
from tests.kit.fakes import CountEnv
from tests.kit.script_kit import ROOT
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


@pytest.mark.parametrize(("field", "value"), [
    ("model", "runs/none"),
    ("value_model", "runs/none"),
    ("reward_model", "runs/none"),
    ("reward_funcs[1]", [share_of_a, "runs/none"]),
])  # fmt: skip
def test_a_trainer_refuses_a_folder_that_is_not_there(tmp_path, field, value):
    arguments = {"environment_factory": CountEnv, field.partition("[")[0]: value}
    with pytest.raises(FileNotFoundError) as caught:
        build(tmp_path, arguments=arguments, max_turns=2)
    assert f"`{field}=runs/none`" in str(caught.value)
