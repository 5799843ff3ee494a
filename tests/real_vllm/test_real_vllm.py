"""Trainings with a real vLLM on the CPU: `make test-vllm`.

The gap between sampler and trainer shows a sync that is missing, a wrong merge and log-probabilities of
other tokens; what the engine makes of a fixed sequence shows when its weights change. (A folder `tests/vllm`
would pass for the package itself wherever that is missing.)
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.waiting import wait_until
from tests.real_vllm.server import MODEL, Server
from tests.real_vllm.training import Training

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="no vLLM here; make test-vllm has one"
    ),
]

EPISODES = 96
LORA = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
# Of a log-probability in float32, where the same weights are computed by two programs: of tokens that were
# sampled, and of any, which may be as small as exp(-30).
ROUNDING, ROUNDING_OF_ANY = 1e-4, 1e-3
QUESTION = [{"role": "user", "content": "Which module defines merge?"}]
GAP = "sampling/sampling_logp_difference"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """One for all trainings that leave it alive."""
    server = Server(tmp_path_factory.mktemp("server") / "log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


def colocated(folder: Path, engine: dict[str, Any], **flags: Any) -> list[dict[str, Any]]:
    return Training(folder, engine=engine, vllm_mode="colocate", **flags).results()


def on(server: Server, folder: Path, **options: Any) -> Training:
    url = {"vllm_mode": "server", "vllm_server_base_url": server.url}
    return Training(folder, **url, **options)


def check_all(ranks: list[dict[str, Any]]) -> None:
    """What holds for every training in float32 whose server lives."""
    check_tokens(ranks)
    check_probes(ranks[0]["probes"])
    assert len(ranks[0]["probes"]) == 3 * 5


def check_tokens(ranks: list[dict[str, Any]]) -> None:
    """All episodes are there, each token from the weights that the trainer has given."""
    check_episodes(ranks)
    assert max(gaps(ranks, "max")) < ROUNDING
    # What is not the policy's own belongs to critic and adapters; these are merged, or go another way.
    names = {name for rank in ranks for name in rank["pushed"]}
    assert not [n for n in names if "critic" in n or "lora" in n or "score" in n]


def check_pushed(ranks: list[dict[str, Any]]) -> None:
    """The names that `check_tokens` looks at are there."""
    assert "model.embed_tokens.weight" in ranks[0]["pushed"]


def check_episodes(ranks: list[dict[str, Any]]) -> None:
    """Each episode was played or has ended for a reason, and the log knows of all."""
    assert {len(rank["rollouts"]) for rank in ranks} == {3}
    episodes = [e for rank in ranks for rollout in rank["rollouts"] for e in rollout]
    assert len(episodes) == EPISODES
    assert all(e["stop_reason"] for e in episodes)
    assert all(e["turns"] or e["error"] for e in episodes)
    shares = [
        sum(value for name, value in entry.items() if name.startswith("stop_reason/"))
        for entry in ranks[0]["log"]
        if "turns/mean" in entry
    ]
    assert shares == pytest.approx([1.0] * 3)


def gaps(ranks: list[dict[str, Any]], kind: str) -> list[float]:
    """Between sampler and trainer, of each rollout batch, over all processes."""
    values = [entry[f"{GAP}/{kind}"] for entry in ranks[0]["log"] if f"{GAP}/{kind}" in entry]
    assert len(values) == 3
    return values


def check_probes(probes: list[dict[str, Any]]) -> None:
    """The engine has the trainer's weights after each of these rollouts, and keeps them until the next."""
    for first in range(0, len(probes), 5):
        rollout, *steps = probes[first : first + 5]
        assert [probe["when"] for probe in (rollout, *steps)] == ["rollout"] + ["step"] * 4
        assert rollout["engine"] == pytest.approx(rollout["trainer"], abs=ROUNDING_OF_ANY)
        for step in steps:
            assert step["engine"] == pytest.approx(rollout["engine"], abs=1e-6)
        moved = zip(steps[-1]["engine"], steps[-1]["trainer"], strict=True)
        assert max(abs(a - b) for a, b in moved) > 10 * ROUNDING_OF_ANY


def test_colocated_full(tmp_path):
    """In the policy's own precision, without being told."""
    ranks = colocated(tmp_path, {})
    check_all(ranks)
    check_pushed(ranks)


def test_colocated_adapter_alone(tmp_path):
    ranks = colocated(tmp_path, {}, **LORA)
    check_all(ranks)
    assert ranks[0]["pushed"] == []


def test_colocated_adapter_merged(tmp_path):
    ranks = colocated(tmp_path, {"enable_lora": False}, **LORA)
    check_all(ranks)
    check_pushed(ranks)


def test_colocated_in_bfloat16(tmp_path):
    ranks = colocated(tmp_path, {"dtype": "bfloat16"})
    check_episodes(ranks)
    means = gaps(ranks, "mean")
    assert min(means) > 1e-5, "the engine is not in bfloat16"
    assert max(means) < 0.01


def test_served_full(server, tmp_path):
    ranks = on(server, tmp_path).results()
    check_all(ranks)
    check_pushed(ranks)


def test_served_lora(server, tmp_path):
    check_all(on(server, tmp_path, **LORA).results())


def test_two_trainers_on_one_server(server, tmp_path):
    flags = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    ranks = on(server, tmp_path, processes=2, **flags).results()
    assert [len(rollout) for rank in ranks for rollout in rank["rollouts"]] == [16] * 6
    check_all(ranks)


def test_a_server_that_dies_in_the_middle_of_a_rollout_ends_the_run(tmp_path):
    server = Server(tmp_path / "server_log")
    pause = {"PAUSE_FOLDER": str(tmp_path), "PAUSE_EPISODE": "40"}
    training = None
    try:
        server.start()
        pausing = {"environment": "tests.real_vllm.pausing:PausingEnv"}
        training = on(server, tmp_path, variables=pause, **pausing)
        wait_until(lambda: (tmp_path / "paused").exists() or training.ended, 300)
        assert not training.ended, training.said()
        server.kill()
        (tmp_path / "go").touch()
        wait_until(lambda: training.ended, 300)
        assert "resume_from_checkpoint=True" in training.said()
    finally:
        if training is not None:
            training.kill()
        server.kill()


def test_an_agent_and_an_adapter_are_served_to_openais_client(tmp_path):
    """As docs/evaluation.md says: greedy answers are the ones that the weights give here."""
    openai, peft = pytest.importorskip("openai"), pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_stppo import Agent

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    config.lora_alpha = 256
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "adapter")
    lora = ["--enable-lora", "--max-lora-rank", "8"]
    lora += ["--lora-modules", f"policy={tmp_path / 'adapter'}"]
    server = Server(tmp_path / "log", *lora, "--served-model-name", "base")
    try:
        server.start()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        said = {}
        for name, folder in {"base": MODEL, "policy": tmp_path / "adapter"}.items():
            whole = folder == MODEL
            own = Agent.from_pretrained(
                str(folder), base_model=None if whole else str(MODEL), max_turn_tokens=24
            )
            answer = client.chat.completions.create(
                model=name, messages=QUESTION, temperature=0.0, max_tokens=24
            )
            said[name] = answer.choices[0].message.content
            assert own.run(None, {"prompt": QUESTION}).turns[0].strip() == said[name].strip()
        assert said["base"] != said["policy"]
    finally:
        server.kill()
