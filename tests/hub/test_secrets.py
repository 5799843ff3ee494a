"""Secrets in every field that can hold one: in no byte that is written, pushed or printed."""

import functools
import gzip
import logging
import zipfile
from pathlib import Path

import pytest
import torch

from tests.hub.hub_kit import REPO, run, saved_base
from tests.hub.hub_server import TOKEN
from tests.kit.fakes import CountEnv

KEY, PASSWORD, HEADER = "planted-key-1", "planted-word-2", "planted-header-3"
ADDRESS = f"http://me:{PASSWORD}@localhost:1/find?api_key={KEY}"
PLANTED = (TOKEN, "hf_" + "PlantedInText4" * 2, KEY, PASSWORD, HEADER)


class LeakyEnv(CountEnv):
    """Says what it knows in an error of every second episode, and when it is closed."""

    def __init__(self, api_key="", url="", headers=None, note=""):
        super().__init__()
        self.said = f"api_key={api_key!r} {url} {headers} {note} " + "x" * 1000

    def reset(self, **row):
        self.fails = row["letter"] in "aceg"
        return super().reset(**row)

    def step(self, action):
        if self.fails:
            raise RuntimeError(self.said)
        return super().step(action)

    def close(self):
        raise RuntimeError(self.said[:200])


def contents(path: Path, data: bytes):
    """The bytes of a file, and of what is packed in it."""
    yield data
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def leaks(folder: Path) -> list[tuple[str, str]]:
    """File and secret, of every secret in every file."""
    return [
        (path.name, secret)
        for path in folder.rglob("*")
        if path.is_file()
        for data in contents(path, path.read_bytes())
        for secret in PLANTED
        if secret.encode() in data
    ]


@pytest.fixture
def settings(tmp_path):
    environment = functools.partial(
        LeakyEnv, api_key=KEY, url=ADDRESS, headers={"Authorization": HEADER}, note=PLANTED[1]
    )
    return {
        "arguments": {"model": saved_base(tmp_path / "base"), "environment_factory": environment},
        "model_init_kwargs": {"token": TOKEN, "dtype": "float32"},
        "chat_template_kwargs": {"nested": [{"password": PASSWORD}]},
        **{"vllm_server_base_url": ADDRESS, "reward_model_path": ADDRESS, "hub_token": TOKEN},
        **{"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "trace_episodes": 8},
        **{"run_name": f"run {PLANTED[1]}", "project": f"api_key={KEY}"},
    }


@pytest.mark.long
def test_no_secret_is_saved_pushed_or_printed(hub, tmp_path, settings, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "run"
    trainer = run(folder, push_to_hub=True, hub_always_push=True, **settings)
    trainer.train()
    trainer.push_to_hub()
    print(trainer.args, repr(trainer.args), trainer.args.to_json_string())
    args = trainer.args
    kept = (args.hub_token, args.model_init_kwargs["token"], args.chat_template_kwargs["nested"])
    assert kept == (TOKEN, TOKEN, [{"password": PASSWORD}])

    assert len(list(folder.rglob("training_args.bin"))) == 3
    assert "RuntimeError" in (folder / "metrics.jsonl").read_text() + caplog.text
    assert leaks(folder) == []
    pushed = tmp_path / "pushed"
    for name, data in hub.repos[REPO].files.items():
        path = pushed / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert (pushed / "training_args.bin").is_file()
    assert leaks(pushed) == []
    printed = capfd.readouterr()
    said = printed.out + printed.err + caplog.text
    ours = [line for line in said.splitlines() if any(secret in line for secret in PLANTED)]
    assert ours == []


@pytest.mark.long
def test_a_run_goes_on_exactly_without_what_was_left_out(tmp_path, settings):
    whole = run(tmp_path / "whole", **settings)
    whole.train()
    resumed = run(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
