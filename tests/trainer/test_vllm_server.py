"""Text environments on TRL's vLLM classes, in server mode, with a small server behind them."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from peft import LoraConfig

from tests.builders import LIMITS, TEXT, Kept, build, logs, prompts
from tests.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.tiers import quick
from tests.vllm_server import ModelSampler, attach, serving
from tests.waiting import PATIENCE
from trl_stppo.core import sampler_correction
from trl_stppo.errors import EnvironmentFailureError
from trl_stppo.generation import server as server_backend


class ThreeTurns(CountEnv):
    """Pays something else for nearly every action, so that there is something to learn."""

    def __init__(self) -> None:
        super().__init__(3)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, sum(map(ord, action)) % 7 / 7, *rest


def setting(**options):
    # One epoch of one mini-batch, so that weights reach the server after every step.
    sizes = {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "kl_coef": 0.0}
    return {**LIMITS, **sizes, **options}


def served(folder, *, change=None, arguments=None, sample=None, **options):
    """A trained trainer, its server and its client; `change` alters the server's model at syncs."""
    arguments = {"environment_factory": ThreeTurns, **(arguments or {})}
    trainer = build(folder, Kept, arguments=arguments, **setting(**options))
    model = tiny_policy(char_tokenizer(), seed=1)  # until the first sync
    with serving(sample or ModelSampler(model, trainer.eos_token_ids)) as server:
        client = attach(trainer, server)
        if change is not None:
            load = client.update_named_params

            def changed(metadata, named):
                load(metadata, named)
                change(server.sample.model)

            client.update_named_params = changed
        trainer.train()
        return trainer, server, client


def rows_of(batch):
    """Per episode: prompt, completion, sampling logprobs, without padding."""
    for b in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][b][batch["prompt_mask"][b].bool()].tolist()
        keep = batch["completion_mask"][b].bool()
        yield (
            prompt,
            batch["completion_ids"][b][keep].tolist(),
            batch["sampling_per_token_logps"][b][keep],
        )


def perturb(model) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight += 0.02 * torch.randn(weight.shape, generator=generator)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return served(tmp_path_factory.mktemp("vllm"), max_turn_tokens=5)


def test_every_sampled_token_and_logprob_is_the_servers(trained):
    trainer, server, _ = trained
    answers = list(server.answers)
    for _, batch, turns, *_ in trainer.kept:
        for b, (prompt, completion, logprobs) in enumerate(rows_of(batch)):
            row, index = prompt + completion, turns.turn_index[b]
            assert int(index.max()) == 2
            for k in range(3):
                places = (index == k).nonzero().flatten().tolist()
                start = len(prompt) + places[0]
                ids = [completion[t] for t in places]
                match = next(a for a in answers if a[0] == row[:start] and a[1] == ids)
                answers.remove(match)
                assert [logprobs[t].item() for t in places] == pytest.approx(match[2], abs=1e-6)
            assert not logprobs[index[: len(completion)] < 0].any()
    assert answers == [], "no completion was thrown away"


def test_requests_are_what_the_trainer_is_set_to(trained):
    trainer, server, _ = trained
    assert {r["max_tokens"] for r in server.requests} == {5}
    assert all(r["logprobs"] == 0 and r["n"] == 1 for r in server.requests)
    assert all(r["temperature"] == trainer.args.temperature for r in server.requests)
    assert trainer.vllm_generation.max_completion_length == LIMITS["max_completion_length"]
    assert all(len(r["prompt"]) == 1 for r in server.requests), "each turn is a request"


def test_the_server_gets_the_weights_of_every_step(trained):
    trainer, server, client = trained
    assert server.resets == client.syncs == 2, "prefixes of running turns are forgotten too"
    figures = [
        entry["sampling/sampling_logp_difference/max"]
        for entry in trainer.state.log_history
        if "sampling/sampling_logp_difference/max" in entry
    ]
    assert len(figures) == 2
    assert max(figures) < 1e-4, "the second rollout was sampled with the second weights"


def test_a_lora_policy_reaches_the_server_merged_and_without_its_critic(tmp_path):
    arguments = {"peft_config": LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"])}
    trainer, _, client = served(tmp_path, arguments=arguments, learning_rate=0.1)
    assert client.syncs == 2
    assert logs(trainer)["sampling/sampling_logp_difference/max"] < 1e-4
    weights = [p for n, p in trainer.model.named_parameters() if "lora_B.default" in n]
    assert any(p.any() for p in weights), "the case should be interesting"
    assert any(p.any() for p in trainer.critic.parameters())


@pytest.mark.parametrize("mode", ["turn_truncate", "turn_mask"])
def test_the_gap_to_a_server_with_other_weights_is_corrected_per_turn(tmp_path, mode):
    bounds = {"vllm_importance_sampling_clip_min": 0.97, "vllm_importance_sampling_clip_max": 1.03}
    trainer, _, _ = served(
        tmp_path, change=perturb, max_steps=1, vllm_importance_sampling_mode=mode, **bounds
    )
    _, batch, turns, *_ = trainer.kept[0]
    old, sampled = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
    ratio, index = batch["importance_sampling_ratio"], turns.turn_index
    expected = sampler_correction(
        old, sampled, index, "turn", truncate=mode == "turn_truncate", clip_min=0.97, clip_max=1.03
    )
    assert torch.equal(ratio, expected)
    inside = index >= 0
    assert (ratio[~inside] == 1.0).all()
    edges = (0.97, 1.03) if mode == "turn_truncate" else (0.0,)
    assert any((ratio[inside] == edge).any() for edge in edges), "the case should be interesting"
    assert ((ratio > 0.97) & (ratio < 1.03) & inside).any()
    for b in range(len(index)):
        for k in range(3):
            assert ratio[b][index[b] == k].unique().numel() == 1
    figures = logs(trainer)
    gap = (old - sampled).abs()[inside]
    assert figures["sampling/sampling_logp_difference/mean"] == pytest.approx(gap.mean().item())
    assert gap.mean() > 0.001
    for name in ("min", "mean", "max"):
        logged = figures[f"sampling/importance_sampling_ratio/{name}"]
        assert logged == pytest.approx(getattr(ratio[inside], name)().item(), rel=1e-5)


def test_upstreams_own_levels_are_left_to_upstream(tmp_path):
    trainer, _, _ = served(
        tmp_path, change=perturb, max_steps=1, vllm_importance_sampling_mode="sequence_mask"
    )
    assert trainer.kept[0][1]["importance_sampling_ratio"].shape == (4, 1)


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_without_the_correction_the_gap_is_logged_where_old_logprobs_are_needed(kl_coef, tmp_path):
    """With one epoch and no KL they are not."""
    options = {"vllm_importance_sampling_correction": False, "kl_coef": kl_coef}
    trainer, _, _ = served(tmp_path, change=perturb, max_steps=1, **options)
    _, batch, turns, *_ = trainer.kept[0]
    assert "importance_sampling_ratio" not in batch
    logged = logs(trainer).get("sampling/sampling_logp_difference/mean")
    if not kl_coef:
        assert ("old_per_token_logps" in batch, logged) == (False, None)
        return
    gap = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
    assert logged == pytest.approx(gap[turns.action_mask].mean())


def played(folder, faults=(), *, during=None, **options):
    """A trainer after its training; `during` is called with the server at each request."""
    trainer = build(folder, Kept, arguments={**TEXT, "environment_factory": ThreeTurns}, **options)
    with serving(ModelSampler(tiny_policy(char_tokenizer()), trainer.eos_token_ids)) as server:
        attach(trainer, server)
        server.faults = list(faults)
        sample, asked = server.sample, itertools.count(1)

        def sampled(prompt, request):
            if during is not None:
                during(server, next(asked))
            return sample(prompt, request)

        # The model stays in sight of the client, which copies weights into it.
        server.sample = Sampled(sample.model, sample.ends, sampled)
        trainer.train()
        return trainer, server


class Sampled(ModelSampler):
    def __init__(self, model, ends, call):
        super().__init__(model, ends)
        self.call = call

    def __call__(self, prompt, request):
        return self.call(prompt, request)


def episodes(trainer):
    return [sorted((tuple(p), tuple(c)) for p, c, _ in rows_of(kept[1])) for kept in trainer.kept]


@pytest.mark.parametrize(
    "fault", quick(["500", "503", "429", "drop", "garbage"], "500", "drop", "garbage")
)
def test_what_the_server_fails_at_is_asked_for_again_and_nothing_changes(
    tmp_path, monkeypatch, fault
):
    monkeypatch.setattr(server_backend, "FIRST_PAUSE", 0.01)
    expected, _ = played(tmp_path / "expected", **setting())
    trainer, server = played(tmp_path / "got", [None, fault, fault, None, None, fault], **setting())
    assert server.faults == []
    assert episodes(trainer) == episodes(expected)
    for one, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)
    asked = [e["sampling/asked_again"] for e in trainer.state.log_history if "loss" in e]
    assert sum(asked) == 3


def token(value):
    """An answer whose first token is another."""
    return lambda choice: choice["token_ids"].__setitem__(0, value)


def scored(value):
    """An answer whose first token has another log-probability."""

    def lie(choice):
        told = choice["logprobs"]
        told["token_logprobs"][0] = told["top_logprobs"][0][told["tokens"][0]] = value

    return lie


def unfinished(choice):
    choice["token_ids"][0] = char_tokenizer().eos_token_id
    choice["token_ids"].append(5)
    told = choice["logprobs"]
    for column in told.values():
        column.append(column[-1])


LIES = {
    "beyond": token(99_999),
    "negative": token(-5),
    "text": token("7"),
    "unscored": lambda choice: choice.update(logprobs=None),
    "endless": unfinished,
    **{str(value): scored(value) for value in (math.inf, -math.inf, 1e300, 5.0, -1e300)},
}


@pytest.mark.parametrize("lie", quick(LIES, *LIES))
def test_what_cannot_be_a_turn_is_asked_for_again(tmp_path, monkeypatch, lie):
    monkeypatch.setattr(server_backend, "FIRST_PAUSE", 0.01)
    trainer, _ = played(tmp_path, [None, LIES[lie]], **setting(max_steps=1))
    assert logs(trainer)["sampling/asked_again"] == 1
    for _, ids, logprobs in rows_of(trainer.kept[0][1]):
        assert max(ids) < len(char_tokenizer())
        assert logprobs.isfinite().all()


def test_a_request_that_the_server_refuses_ends_the_training_at_once(tmp_path):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"refuses a turn: Request failed: 400, .*out of memory"):
        played(tmp_path, [None, "400"], **setting())
    assert time.monotonic() - started < PATIENCE


@pytest.mark.parametrize("moment", ["within a turn", "between rollouts"])
def test_a_server_that_was_started_anew_gets_the_weights_before_any_turn_counts(tmp_path, moment):
    """It forgets weights and their name, as vLLM does."""

    def restart(server, number):
        if number == (2 if moment == "within a turn" else 12):
            server.sample.model.load_state_dict(tiny_policy(char_tokenizer(), seed=9).state_dict())
            server.weights = "default"

    trainer, server = played(tmp_path, during=restart, **setting())
    assert server.joined == 1
    gaps = [
        e["sampling/sampling_logp_difference/max"] for e in trainer.state.log_history if "loss" in e
    ]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4, "no token of the forgotten weights is trained on"
    assert {e.stop_reason for e in trainer.episodes} == {"terminated"}


def test_a_server_that_stays_away_ends_episodes_and_in_the_end_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(server_backend, "FIRST_PAUSE", 0.01)
    options = setting(vllm_server_timeout=0.2, max_steps=30)
    trainer = build(
        tmp_path, Kept, arguments={**TEXT, "environment_factory": ThreeTurns}, **options
    )
    with serving(ModelSampler(tiny_policy(char_tokenizer()), trainer.eos_token_ids)) as server:
        client = attach(trainer, server)
        server.faults = [None] * 12 + ["503"] * 10_000  # the first rollout batch is whole
        with pytest.raises(EnvironmentFailureError, match="Request failed: 503"):
            trainer.train()
    assert client.syncs >= 2
    assert {e.stop_reason for e in trainer.episodes} == {"sampler_error"}
    assert trainer._player.engine.calls._running == {}


def test_a_server_that_cannot_name_its_weights_is_believed(tmp_path):
    trainer = build(
        tmp_path, Kept, arguments={**TEXT, "environment_factory": ThreeTurns}, **setting()
    )
    with serving(ModelSampler(tiny_policy(char_tokenizer()), trainer.eos_token_ids)) as server:
        attach(trainer, server)
        client = trainer._player._sampler.vllm._client
        post = client.client._post

        def old(url, **options):
            if url.endswith("update_weight_version"):
                raise Exception("Request failed: 404, not found")
            return post(url, **options)

        client.client._post = old
        trainer.train()
    assert {e.stop_reason for e in trainer.episodes} == {"terminated"}
    assert server.weights == "default"


def test_an_evaluation_is_about_the_policy_as_it_is(tmp_path):
    rows = {"eval_dataset": prompts(3)}
    trainer, _, client = served(
        tmp_path, arguments=rows, max_steps=2, eval_strategy="steps", eval_steps=1
    )
    assert client.syncs == 3
    assert not any("eval_sampling" in name for e in trainer.state.log_history for name in e)


def test_a_rollout_func_finds_the_weights_of_every_step(tmp_path):
    gaps = []

    def play(prompts, trainer):
        server, own = trainer.server.sample.model, trainer.model
        pairs = zip(server.parameters(), own.parameters(), strict=True)
        gaps.append(max((a - b).abs().max().item() for a, b in pairs))
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * len(ids)}

    trainer = build(
        tmp_path,
        arguments={
            "rollout_func": play,
            "reward_funcs": lambda prompts, **_: [*range(len(prompts))],
        },
        **{**setting(), "max_turns": None, "max_turn_tokens": None, "learning_rate": 0.01},
    )
    with serving(ModelSampler(tiny_policy(char_tokenizer()), [2])) as server:
        client, trainer.server = attach(trainer, server), server
        trainer.train()
    assert client.syncs == len(gaps) == 2
    assert max(gaps) == 0


def test_weights_that_are_loaded_reach_the_server_whatever_the_step(tmp_path):
    """The best ones at the end, which an evaluation plays with."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = build(
        tmp_path,
        arguments={**TEXT, "environment_factory": ThreeTurns, "eval_dataset": prompts(4)},
        **setting(max_steps=3, learning_rate=0.05, load_best_model_at_end=True, **every),
        metric_for_best_model="episode/score",
        greater_is_better=False,
    )
    with serving(ModelSampler(tiny_policy(char_tokenizer()), trainer.eos_token_ids)) as server:
        attach(trainer, server)
        trainer.train()
        own = dict(trainer.model.named_parameters())

        def gap():
            pairs = server.sample.model.named_parameters()
            return max((own[name] - p).abs().max().item() for name, p in pairs)

        assert gap() > 0, "the last are not the best"
        trainer.evaluate()
        assert gap() == 0
