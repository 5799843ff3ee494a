"""The Hub refuses, breaks off or is not there: nothing is lost, and what is said helps."""

import logging

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.hub.hub_kit import REPO, letters, run
from tests.kit.fakes import CountEnv
from tests.kit.waiting import wait_until
from trl_stppo import Agent
from trl_stppo.errors import HubError
from trl_stppo.hub import loading
from trl_stppo.trainer import disk

PUSHES = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "push_to_hub": True}
WEIGHTS = "model.safetensors"


@pytest.mark.long
def test_a_push_from_a_checkpoint_that_fails_is_told_and_ends_no_run(hub, tmp_path, caplog):
    trainer = run(tmp_path / "run", hub_strategy="checkpoint", **PUSHES)
    hub.fail("preupload", 401)
    with caplog.at_level(logging.WARNING, logger="trl_stppo"):
        output = trainer.train()
    assert output.global_step == 2

    def told():
        return [r.message for r in caplog.records if "training goes on" in r.message]

    # A thread tells it, perhaps a moment after the run.
    assert wait_until(lambda: len(told()) >= 2), told()
    assert any("checkpoint-2" in text for text in told())
    assert disk.complaint(tmp_path / "run" / "checkpoint-2") is None
    hub.faults.clear()
    trainer.push_to_hub()
    assert WEIGHTS in hub.repos[REPO].files


def test_a_download_that_fails_for_good_names_the_repository(hub, tmp_path):
    run(tmp_path / "run").push_to_hub()
    for pattern, status in (("resolve", 500), ("revision|tree", 503)):
        hub.fail(f"(GET|HEAD) .*({pattern})", status)
        with pytest.raises(HubError, match=r"'me/agent' is no folder here and could not be downloaded"):
            Agent.from_pretrained(REPO)
        hub.faults.clear()
    assert Agent.from_pretrained(REPO).run(CountEnv, letters()[0]).turns


@pytest.mark.skipif(not loading.INCOMPLETE, reason="this huggingface_hub does not tell the case apart")
def test_a_published_critic_that_is_missing_offline_is_an_error_not_a_new_critic(monkeypatch):
    raised = [loading.INCOMPLETE("in part", "/cache"), LocalEntryNotFoundError("nothing")]

    def unreachable(*_, **__):
        raise raised.pop(0)

    monkeypatch.setattr(loading, "snapshot_download", unreachable)
    with pytest.raises(HubError):
        loading.critic_folder("me/agent", "critic")
    assert loading.critic_folder("me/agent", "critic") is None
