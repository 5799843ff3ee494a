"""A colocated engine: what it is built with, what it is given, and turns that go to it one by one.

TRL's `VLLMGeneration` is real; vLLM is not (`tests/real_vllm` has it), in its place a model samples as its
engine would.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, PeftModel
from trl.generation import vllm_generation

from tests.hub.hub_kit import saved_base
from tests.kit.builders import LIMITS, Kept, build
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.kit.vllm_server import ModelSampler
from trl_stppo import STPPOTrainer
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.trainer import _trl_vllm

LORA = {"r": 6, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}


class FakeLLM:
    """Has what TRL and we ask `vllm.LLM` for."""

    made: ClassVar[list["FakeLLM"]] = []

    def __init__(self, **options):
        self.options, self.events, self.pushed, self.resets = options, [], [], 0
        self.model = tiny_policy(char_tokenizer(), seed=7)
        self.sampler = ModelSampler(self.model, [char_tokenizer().eos_token_id])
        self.requests, self.all = {}, []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        lora = SimpleNamespace() if options.get("enable_lora") else None
        counts = SimpleNamespace(get_request_counts=lambda: (0, 0))
        self.llm_engine = SimpleNamespace(
            model_executor=executor,
            vllm_config=SimpleNamespace(lora_config=lora),
            model_config=SimpleNamespace(max_model_len=512),
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=counts)),
            add_request=self.add,
            step=self.step,
            abort_request=lambda names: [self.requests.pop(name) for name in names],
        )
        FakeLLM.made.append(self)

    def load(self, weights):
        ((name, tensor),) = weights
        self.pushed.append(name)
        with torch.no_grad():
            dict(self.model.named_parameters(remove_duplicate=False))[name].copy_(tensor)

    def add(self, name, prompt, *, params, lora_request):
        assert self.events[-1:] != ["sleep"]
        self.requests[name] = (prompt["prompt_token_ids"], params, lora_request)
        self.all.append(self.requests[name])

    def step(self):
        name = next(iter(self.requests))
        row, params, adapter = self.requests.pop(name)
        sampler = self.sampler if adapter is None else self.adapted(adapter)
        ids, logprobs = sampler(row, params)
        told = [{i: SimpleNamespace(logprob=p)} for i, p in zip(ids, logprobs, strict=True)]
        turn = SimpleNamespace(token_ids=ids, logprobs=told)
        said = {"request_id": name, "finished": True, "outputs": [turn]}
        return [SimpleNamespace(**said, prompt_token_ids=row, num_cached_tokens=0)]

    def adapted(self, adapter):
        base = tiny_policy(char_tokenizer())
        model = PeftModel.from_pretrained(base, adapter.folder)
        return ModelSampler(model, self.sampler.ends)

    def reset_prefix_cache(self):
        self.resets += 1

    def sleep(self, level):
        self.events.append("sleep")

    def wake_up(self, tags):
        self.events += tags


@pytest.fixture
def engine(monkeypatch):
    """The engines that are built."""
    FakeLLM.made.clear()
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *_: True)
    monkeypatch.setattr(vllm_generation, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
    monkeypatch.setattr(vllm_generation, "ensure_master_addr_port", lambda: None)
    monkeypatch.setattr(
        _trl_vllm, "adapter", lambda number, folder: SimpleNamespace(number=number, folder=folder)
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    return FakeLLM.made


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A policy on the disk, which its name stands for."""
    return saved_base(tmp_path_factory.mktemp("policy"))


def trained(folder, trainer_class=Kept, arguments=None, **options):
    arguments = {"environment_factory": lambda: CountEnv(2), **(arguments or {})}
    sizes = {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "max_steps": 2}
    options = {**LIMITS, **sizes, "use_vllm": True, "vllm_mode": "colocate", **options}
    trainer = build(folder, trainer_class, arguments=arguments, **options)
    trainer.train()
    return trainer


def gaps(trainer):
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_turns_are_sampled_one_by_one_with_the_weights_of_every_step(tmp_path, engine):
    trainer = trained(tmp_path, max_turn_tokens=5, learning_rate=0.01)
    (llm,) = engine
    assert llm.options["dtype"] == "float32", "that of the policy, which TRL does not pass on"
    assert "enable_lora" not in llm.options
    assert len(llm.all) == 2 * 4 * 2
    assert {params["max_tokens"] for _, params, _ in llm.all} == {5}
    assert not any("seed" in params for _, params, _ in llm.all), "on a CPU vLLM refuses them"
    assert {params["temperature"] for _, params, _ in llm.all} == {trainer.args.temperature}
    names = set(dict(trainer.model.named_parameters()))
    assert set(llm.pushed) == names
    assert len(llm.pushed) == 2 * len(names)
    assert not any("critic" in name or "score" in name for name in llm.pushed)
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < 1e-4
    assert [e.policy_versions for e in trainer.episodes] == [[1, 1]] * 4


@pytest.mark.long
def test_an_adapter_goes_to_the_engine_alone_and_each_version_has_a_name(tmp_path, engine, saved):
    arguments = {"model": saved, "peft_config": LoraConfig(**LORA)}
    usual = {"revision": "main", "trust_remote_code": False, "dtype": None}
    options = {"learning_rate": 0.1, "kl_coef": 0.0, "model_init_kwargs": usual}
    trainer = trained(tmp_path, STPPOTrainer, arguments, **options)
    (llm,) = engine
    assert (llm.options["enable_lora"], llm.options["max_lora_rank"]) == (True, 8)
    assert llm.pushed == []
    assert llm.resets == 0, "its cache goes by the adapter's name"
    numbers = [adapter.number for _, _, adapter in llm.all]
    assert sorted(set(numbers)) == [1, 2]
    assert numbers == sorted(numbers)
    assert max(gaps(trainer)) < 1e-4, "what is sampled is what is trained"
    last = Path(llm.all[-1][2].folder)
    assert {path.name for path in last.iterdir()} >= {"adapter_model.safetensors"}
    assert "critic" not in str(list(last.rglob("*")))
    assert not Path(llm.all[0][2].folder).exists()


MERGED = {
    "a model of one's own": ({}, {}),
    "another revision": ({"model_init_kwargs": {"revision": "v2"}}, {}),
    "no room": ({"vllm_engine_kwargs": {"enable_lora": False}}, {}),
    "sleeps": ({"vllm_enable_sleep_mode": True}, {}),
    "dora": ({}, {"use_dora": True}),
    "moves weights": ({}, {"init_lora_weights": "pissa"}),
    "ranks": ({}, {"rank_pattern": {"q_proj": 2}}),
    "embeddings": ({}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "saves modules": ({}, {"modules_to_save": ["lm_head"]}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MERGED)
def test_where_vllm_cannot_have_the_adapter_weights_are_merged(tmp_path, engine, saved, case):
    options, lora = MERGED[case]
    model = tiny_policy(char_tokenizer()) if case.startswith("a model") else saved
    arguments = {"model": model, "peft_config": LoraConfig(**{**LORA, **lora})}
    arguments["environment_factory"] = lambda: CountEnv(2)
    trainer = build(tmp_path, arguments=arguments, **{**LIMITS, "kl_coef": 0.0, "use_vllm": True, **options})
    (llm,) = engine
    assert not llm.options.get("enable_lora")
    if case in ("a model of one's own", "no room"):
        trainer.train()
        assert llm.pushed
        assert not any("lora" in name for name in llm.pushed)


def test_an_error_of_the_engine_ends_the_training_and_lets_it_sleep(tmp_path, engine):
    def broken(self):
        raise RuntimeError("out of pages")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeLLM, "step", broken)
        with pytest.raises(RuntimeError, match="out of pages"):
            trained(tmp_path, vllm_enable_sleep_mode=True)
    assert engine[0].events[-1] == "sleep"
    assert engine[0].requests == {}


def test_seeds_name_the_turn_where_the_device_takes_them():
    sampling = {"repetition_penalty": 1.0, "temperature": 0.7, "top_p": 1.0, "top_k": 0}
    sampling |= {"min_p": None, "logprobs": 0, "structured_outputs_regex": None}
    vllm = SimpleNamespace(**sampling, generation_kwargs={"frequency_penalty": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
        options = _trl_vllm.turn_options(vllm, seeded=True, adapter=None)
        first, again, other = (
            options(TurnRequest(0, [1], 9, seed))["params"] for seed in ((1, 2), (1, 2), (1, 3))
        )
        vllm.generation_kwargs |= {"seed": 5, "min_tokens": 12, "max_tokens": 99, "logprobs": 4}
        own = _trl_vllm.turn_options(vllm, seeded=True, adapter=None)
        told = own(TurnRequest(0, [1], 9, (1, 2)))["params"]
        vllm.generation_kwargs["stop"] = ["."]
        stopping = own(TurnRequest(0, [1], 9, (1, 2)))["params"]
    assert first == again
    assert first["seed"] != other["seed"]
    assert first["detokenize"] is False
    assert stopping["detokenize"] is True, "vLLM looks for it in the text"
    assert 0 <= first["seed"] < 2**63
    assert (first["max_tokens"], first["min_p"], first["frequency_penalty"]) == (9, 0.0, 0.5)
    assert told["seed"] == 5
    limits = (told["min_tokens"], told["max_tokens"], told["logprobs"])
    assert limits == (9, 9, 0), "a turn's own go before"
