"""Text environments on TRL's vLLM classes, in server mode, with a small server behind them."""

import itertools
from contextlib import contextmanager

import pytest
import torch

from tests.kit.builders import LIMITS, Kept, build, logs, prompts
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.kit.tiers import quick
from tests.kit.vllm_server import ModelSampler, attach, serving
from trl_stppo.core import sampler_correction
from trl_stppo.errors import RolloutError


class ThreeTurns(CountEnv):
    """Pays something else for nearly every action, so that there is something to learn."""

    def __init__(self) -> None:
        super().__init__(3)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, sum(map(ord, action)) % 7 / 7, *rest


@contextmanager
def running(folder, *, arguments=None, sample=None, during=None, **options):
    """A trainer, its server and its client; `during` is called with the number of each request, from 1 on."""
    # One epoch of one mini-batch, so that weights reach the server after every step.
    sizes = {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "kl_coef": 0.0}
    given = {"environment_factory": ThreeTurns, **(arguments or {})}
    given = {name: value for name, value in given.items() if value is not None}
    trainer = build(folder, Kept, arguments=given, **{**LIMITS, **sizes, **options})
    model = tiny_policy(char_tokenizer(), seed=1)
    with serving(sample or ModelSampler(model, trainer.eos_token_ids)) as server:
        answer, asked = server.answer, itertools.count(1)

        def answered(handler, request):
            if during is not None:
                during(server, next(asked))
            answer(handler, request)

        server.answer = answered
        yield trainer, server, attach(trainer, server)


def served(folder, faults=(), *, change=None, **options):
    """The same after a training; `change` alters the server's model at syncs."""
    with running(folder, **options) as (trainer, server, client):
        server.faults = list(faults)
        load = client.update_named_params

        def changed(metadata, named):
            load(metadata, named)
            if change is not None:
                change(server.sample.model)

        client.update_named_params = changed
        trainer.train()
        return trainer, server, client


def largest_gaps(trainer):
    """Between the log-probabilities of server and trainer, by step."""
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


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


@pytest.mark.long
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


def test_the_server_gets_the_weights_of_every_step(trained):
    trainer, server, client = trained
    assert server.resets == client.syncs == 2, "prefixes of running turns are forgotten too"
    assert len(largest_gaps(trainer)) == 2
    assert max(largest_gaps(trainer)) < 1e-4, "the second rollout was sampled with the second weights"


@pytest.mark.long
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


def episodes(trainer):
    return [sorted((tuple(p), tuple(c)) for p, c, _ in rows_of(kept[1])) for kept in trainer.kept]


@pytest.mark.long
@pytest.mark.parametrize("fault", quick(["400", "500", "drop", "garbage", "restart"], "restart"))
def test_a_server_that_fails_in_a_rollout_ends_the_run_which_resumes(tmp_path, fault, trained):
    """A server that was started anew has other weights, of which no token is trained on."""

    def fail(server, number):
        # The first rollout takes 12 requests.
        if number == 16 and fault == "restart":
            server.restart(tiny_policy(char_tokenizer(), seed=9).state_dict())
        elif number == 16:
            server.faults = [fault]

    expected, _, _ = trained
    with pytest.raises(RolloutError, match=r"vLLM server has .*resume_from_checkpoint=True.*t-1 "):
        served(tmp_path, during=fail, max_turn_tokens=5)
    with running(tmp_path, max_turn_tokens=5) as (trainer, _, _):
        trainer.train(resume_from_checkpoint=True)
    assert episodes(trainer)[-1] == episodes(expected)[-1]
    for one, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_that_the_server_does_not_take_end_the_run(tmp_path):
    with running(tmp_path) as (trainer, _, client):
        client.update_named_params = None
        with pytest.raises(RolloutError, match="did not take the weights"):
            trainer.train()


@pytest.mark.long
def test_an_evaluation_is_about_the_policy_as_it_is(tmp_path):
    given = {"arguments": {"eval_dataset": prompts(3)}, "eval_strategy": "steps", "eval_steps": 1}
    trainer, _, client = served(tmp_path, **given)
    assert client.syncs == 3
    assert not any("eval_sampling" in name for e in trainer.state.log_history for name in e)


def gap(trainer, server):
    """Between the weights of the two."""
    own = dict(trainer.model.named_parameters())
    pairs = server.sample.model.named_parameters()
    return max((own[name] - p).abs().max().item() for name, p in pairs)


def test_a_rollout_func_finds_the_weights_of_every_step(tmp_path):
    gaps = []

    def play(prompts, trainer):
        gaps.append(gap(trainer, trainer.server))
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * len(ids)}

    arguments = {"rollout_func": play, "environment_factory": None}
    arguments["reward_funcs"] = lambda prompts, **_: [*range(len(prompts))]
    options = {"max_turns": None, "max_turn_tokens": None, "learning_rate": 0.01}
    with running(tmp_path, arguments=arguments, **options) as (trainer, server, client):
        trainer.server = server
        trainer.train()
    assert client.syncs == len(gaps) == 2
    assert max(gaps) == 0


@pytest.mark.long
def test_weights_that_are_loaded_reach_the_server_whatever_the_step(tmp_path):
    """The best ones at the end, which an evaluation plays with."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"max_steps": 3, "learning_rate": 0.05, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "episode/score", "greater_is_better": False}
    given = {"arguments": {"eval_dataset": prompts(4)}}
    with running(tmp_path, **given, **options) as (trainer, server, _):
        trainer.train()
        assert gap(trainer, server) > 0, "the last are not the best"
        trainer.evaluate()
        assert gap(trainer, server) == 0
