"""The Hub refuses, breaks off or is not there: nothing is lost, and what is said helps."""

import logging

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.hub.hub_kit import REPO, Impatient, letters, logits, run
from tests.hub.hub_server import LocalHub
from tests.kit.fakes import CountEnv
from tests.kit.waiting import wait_until
from trl_stppo import Agent
from trl_stppo.errors import HubError
from trl_stppo.hub import loading
from trl_stppo.trainer import disk

PUSHES = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "push_to_hub": True}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has ended, and what it holds."""
    trainer = run(tmp_path_factory.mktemp("trained") / "run", max_steps=1)
    trainer.train()
    return trainer


@pytest.fixture
def pushable(trained):
    """The run as if no repository had been made for it yet."""
    trained.hub_model_id, trained.push_in_progress = None, None
    return trained


@pytest.mark.parametrize(
    ("pattern", "status", "headers"),
    [("preupload", 429, {"Retry-After": "7"}), ("PUT /lfs", 500, {}), ("PUT /lfs", None, {})],
)
def test_what_goes_wrong_once_is_tried_again(hub, pushable, pattern, status, headers):
    Impatient.waited.clear()
    hub.fail(pattern, status, times=1, headers=headers)
    pushable.push_to_hub()
    assert WEIGHTS in hub.repos[REPO].files
    assert not headers or max(Impatient.waited) >= 7


def warnings_of(caplog, count):
    """What was told of pushes; a thread tells it, perhaps a moment after the run."""

    def told():
        return [r.message for r in caplog.records if "training goes on" in r.message]

    assert wait_until(lambda: len(told()) >= count), told()
    return told()


@pytest.mark.long
@pytest.mark.parametrize("status", [401, None])
def test_a_push_from_a_checkpoint_that_fails_is_told_and_ends_no_run(hub, tmp_path, caplog, status):
    trainer = run(tmp_path / "run", hub_strategy="checkpoint", **PUSHES)
    hub.fail("preupload" if status else "PUT /lfs", status)
    with caplog.at_level(logging.WARNING, logger="trl_stppo"):
        output = trainer.train()
    assert output.global_step == 2
    told = warnings_of(caplog, 2)
    assert any("checkpoint-2" in text for text in told)
    assert disk.complaint(tmp_path / "run" / "checkpoint-2") is None
    hub.faults.clear()
    trainer.push_to_hub()
    assert WEIGHTS in hub.repos[REPO].files


@pytest.fixture
def published(hub: LocalHub, pushable):
    pushable.push_to_hub()
    return hub


def test_a_download_that_breaks_off_goes_on_from_there(published, pushable):
    published.fail(f"GET /{REPO}/resolve/.*{WEIGHTS}", None, times=1, after=1000)
    agent = Agent.from_pretrained(REPO)
    assert published.count(f"GET /{REPO}/resolve/.*/{WEIGHTS}") == 2
    assert logits(agent.model).equal(logits(pushable.model))


@pytest.mark.parametrize(("pattern", "status"), [("resolve", 500), ("revision|tree", 503)])
def test_a_download_that_fails_for_good_names_the_repository(published, pattern, status):
    published.fail(f"(GET|HEAD) .*({pattern})", status)
    with pytest.raises(HubError, match=r"'me/agent' is no folder here and could not be downloaded"):
        Agent.from_pretrained(REPO)
    published.faults.clear()
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
