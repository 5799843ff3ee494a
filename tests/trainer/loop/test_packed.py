"""Packed passes against padded ones: log-probabilities, values, gradients, and who goes padded."""

import random

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.kit.builders import build, quick_config, train
from tests.kit.fakes import char_tokenizer
from tests.kit.surroundings import USE_CPU
from tests.kit.tiers import quick
from trl_stppo import STGRPOTrainer, STPPOTrainer
from trl_stppo.generation import slots
from trl_stppo.generation.slots import supports
from trl_stppo.rollout.episode import Context
from trl_stppo.trainer.batch import collate
from trl_stppo.trainer.loop.packed import Costs, Rows
from trl_stppo.trainer.shuffle import take_rows

VOCABULARY = len(char_tokenizer())
DEVICE = torch.device("cpu" if USE_CPU else "cuda")
HIDDEN = [9, 9]
CASES = {
    "ragged": [([3, 4, 5], [6] * n) for n in (1, 9, 4)],
    "groups": [([a, 4, 5, 8], [6, n, 7]) for a in (3, 9) for n in (1, 2, 3)],
    "contexts": [([3], [4, 5]), ([3, 4, 5, 9], [6, 7]), ([3, 4], [5, 9, 6])],
    "one token": [([3], [4]), ([3], [5]), ([7], [4])],
    "nothing in common": [([3, 4], [5, 6]), ([5], [3, 4, 5]), ([8, 9, 3], [4])],
    "equal rows": [([3, 4], [5, 6])] * 3,
    "nothing that counts": [([3, 4], HIDDEN), ([3, 4], [5, 6]), ([3], [4])],
}


def policy(kind="llama", attention="sdpa", **options):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {name: options.pop(name) for name in sizes if name in options}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, initializer_range=0.3, **sizes, **heads, **options
    )
    config.eos_token_id = config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(rows, observed=()):
    contexts = [
        Context(prompt_ids=[*p], ids=[*c], action_mask=[n not in observed for n in range(len(c))])
        for p, c in rows
    ]
    return collate(
        contexts, pad_token_id=0, multiple_of=None, device=DEVICE,
        has_logprobs=False, hidden=[c is HIDDEN for _, c in rows],
    )  # fmt: skip


def trainer_of(folder, model, **options):
    return build(folder, STPPOTrainer, arguments={"model": model}, **options)


def always(monkeypatch):
    """Take packs whatever they cost, in two of them."""

    def plan(self, costs, max_rows, *, equal=False):
        order = sorted(range(len(self.rows)), key=self.rows.__getitem__)
        return [part for part in (order[:2], order[2:]) if part]

    monkeypatch.setattr(Rows, "plan", plan)


def both(forward, compute):
    """The result of a pass by packs and by padded rows, with gradients by the trained weights."""
    results = []
    for reason in (None, "of the test"):
        forward.why_padded = reason
        results.append(compute())
    forward.why_padded = None
    return results


def lengths(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


def gradients(trainer, output, mask):
    weights = torch.linspace(0.5, 1.5, output.numel()).view_as(output)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    parts = torch.autograd.grad((output * weights)[mask].sum(), parameters, allow_unused=True)
    return torch.cat([p.flatten() for p in parts if p is not None])


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def attentive(request, tmp_path_factory):
    """A trainer whose policy has this attention."""
    return trainer_of(tmp_path_factory.mktemp("run"), policy(attention=request.param))


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "LoRA"])
def with_critic(request, tmp_path_factory):
    """A trainer whose critic says something of every token."""
    options = {}
    if request.param:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj"])
    arguments = {"model": policy(), **options}
    trainer = build(tmp_path_factory.mktemp("run"), STPPOTrainer, arguments=arguments)
    torch.nn.init.normal_(trainer.critic.head.weight)
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_packed_passes_equal_padded_ones(attentive, monkeypatch, case):
    trainer, batch = attentive, batch_of(CASES[case], observed=(1,))
    forward = trainer._forward
    assert forward.why_padded is None
    always(monkeypatch)
    trainer.model.eval()
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    seen = []

    def compute():
        logprobs, entropy, _ = forward.policy(trainer.model, batch, entropy=True)
        seen.append(forward.was_packed)
        return logprobs, entropy, gradients(trainer, logprobs, mask)

    packed, padded = both(forward, compute)
    assert seen == [True, False]
    for a, b in zip(packed[:2], padded[:2], strict=True):
        torch.testing.assert_close(a[mask], b[mask], rtol=0, atol=1e-5)
    assert (packed[0][~mask] == 0).all()
    assert (packed[2] - padded[2]).norm() <= 1e-5 * padded[2].norm()


@pytest.mark.parametrize("case", CASES)
def test_packed_values_equal_padded_ones(with_critic, monkeypatch, case):
    forward, critic, batch = with_critic._forward, with_critic.critic, batch_of(CASES[case])
    assert forward.why_padded is None
    always(monkeypatch)
    counts = torch.nn.functional.pad(batch["completion_mask"], (1, 0), value=1).bool()

    def compute():
        with critic.active():
            values = forward.values(batch)
            parameters = critic.parameters()
            parts = torch.autograd.grad(values[counts].square().sum(), parameters, allow_unused=True)
        return values.detach(), torch.cat([p.flatten() for p in parts if p is not None])

    packed, padded = both(forward, compute)
    torch.testing.assert_close(packed[0][counts], padded[0][counts], rtol=1e-5, atol=1e-5)
    assert (packed[1] - padded[1]).norm() <= 1e-5 * padded[1].norm()


def test_any_split_gives_the_same_numbers(tmp_path):
    draw = random.Random(0)
    rows = [([3, 4, 5, 6], [draw.randrange(3, 9) for _ in range(draw.randint(1, 9))]) for _ in range(8)]
    trainer = trainer_of(tmp_path, policy())
    forward, batch = trainer._forward, batch_of(rows)
    whole = forward.policy(trainer.model, batch)[0]
    assert forward.was_packed
    parts = [
        forward.policy(trainer.model, take_rows(batch, part))[0] for part in torch.arange(8).split([1, 2, 5])
    ]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=1e-5)
    limited = forward.policy(trainer.model, batch, 2)[0]
    torch.testing.assert_close(whole, limited, rtol=0, atol=1e-5)


def test_a_training_by_packs_is_the_padded_one(tmp_path, monkeypatch):
    always(monkeypatch)
    start = torch.cat([p.detach().flatten() for p in policy().to(DEVICE).parameters()])
    runs = []
    for name in ("packed", "padded"):
        torch.manual_seed(0)
        arguments = {"model": policy(), "reward_funcs": lengths}
        trainer = build(
            tmp_path / name, STPPOTrainer, arguments=arguments, optim="sgd", max_steps=4,
            learning_rate=5e-2,
        )  # fmt: skip
        if name == "padded":
            trainer._forward.why_padded = "of the test"
        trainer.train()
        shares = [entry["perf/packed_share"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((shares, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
    assert (min(runs[0][0]), max(runs[1][0])) == (1.0, 0.0)
    moved = (runs[1][1] - start).norm()
    assert moved > 1e-3
    assert (runs[0][1] - runs[1][1]).norm() <= 1e-3 * moved


def test_an_attention_that_goes_padded():
    model = policy()
    model.config._attn_implementation = "flex_attention"
    assert "flex_attention" in supports(model)


MIXED = {"sliding_window": 8, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWS = {
    "gemma3_text": MIXED,
    # Its softcapping needs "eager" attention.
    "gemma2": {**MIXED, "attention": "eager"},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    "olmo3": {**MIXED, "pad_token_id": 0},
}


@pytest.mark.parametrize("longest", [8, 30])
@pytest.mark.parametrize("kind", quick([*WINDOWS], "gemma3_text", "gemma2", "mistral"))
def test_sliding_windows_hide_the_same_tokens_in_packs(kind, longest, tmp_path, monkeypatch):
    """A window is a limit only for rows that are longer than it."""
    trainer = trainer_of(tmp_path, policy(kind, **WINDOWS[kind]))
    torch.nn.init.normal_(trainer.critic.head.weight)
    forward, draw = trainer._forward, random.Random(0)
    assert forward.why_padded is None
    always(monkeypatch)
    rows = [([3, 4, 5], [draw.randrange(3, 20) for _ in range(longest - 3 - n)]) for n in range(3)]
    batch = batch_of(rows)
    mask = batch["completion_mask"].bool()

    def compute():
        values = forward.values(batch)[:, :-1]
        return forward.policy(trainer.model, batch)[0][mask].detach(), values[mask].detach()

    packed, padded = both(forward, compute)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=2e-5)
    monkeypatch.setattr(slots, "window_of", lambda config: None)
    gap = (compute()[0] - padded[0]).abs().max()
    assert gap > 0.1 if longest > 8 else gap < 2e-5


def test_passes_are_compared_in_the_precision_of_the_weights(tmp_path):
    trainer = trainer_of(tmp_path, policy(hidden_size=64), bf16=True)
    assert trainer.model.dtype == torch.float32
    assert trainer._forward.why_padded is None


def test_a_model_that_reads_the_mask_in_another_way_is_found_out(tmp_path):
    model = policy()
    forward = model.model.forward

    def careless(*args, attention_mask=None, **kwargs):
        return forward(*args, attention_mask=None, **kwargs)

    model.model.forward = careless
    assert "differ" in str(trainer_of(tmp_path, model)._forward.why_padded)


def test_an_overridden_hook_gets_padded_passes(tmp_path):
    calls = []

    class Mine(STGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            calls.append(len(args))
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    trainer = train(tmp_path, Mine, max_steps=1, num_generations=4)
    assert calls
    assert "overridden" in trainer._forward.why_padded


def test_a_compiled_model_goes_padded(tmp_path):
    args = quick_config(tmp_path, torch_compile=True)
    trainer = build(tmp_path, STPPOTrainer, arguments={"args": args})
    assert "torch_compile" in trainer._forward.why_padded


def test_who_counts_passes_gets_one_pack(tmp_path):
    """DDP that searches for unused weights counts its last pass alone."""
    forward = trainer_of(tmp_path, policy())._forward
    rows = Rows(batch := batch_of([([3, 4], [5] * 40), ([6], [7])]), batch["completion_mask"].bool())
    costs = Costs(quadratic=1.0, head=0.0, pass_=0.0)
    assert len(rows.plan(costs, None)) == 2
    assert len(rows.plan(costs, None, equal=True)) == 1
    for searches in (False, True):
        ddp = DistributedDataParallel.__new__(DistributedDataParallel)
        vars(ddp).update(find_unused_parameters=searches, static_graph=False)
        assert forward._engine.counts_passes(ddp) is searches
