"""What must be equal with images, each beside a change that must be noticed."""

import re

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from tests.kit.vision import FAMILIES, UNCACHED, picture, vision_model
from tests.kit.vision_runs import own_logprobs, own_table, trained, vision_trainer
from trl_stppo.generation.cached import CachedBackend
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.generation.slots import base_of
from trl_stppo.trainer.loop.packed import Rows, mask_of
from trl_stppo.trainer.setup.images import make_reader

EVERY = [
    pytest.param(name, marks=[] if name in ("Qwen2.5-VL", "LLaVA", "SmolVLM in tiles") else pytest.mark.long)
    for name in FAMILIES
]  # fmt: skip
ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
# Families of which upstream and we train on the same tensors.
AS_TRL = ["Qwen2.5-VL", "LLaVA"] + [
    pytest.param(name, marks=pytest.mark.long)
    for name in sorted((FAMILIES | UNCACHED).keys() - {"Qwen2.5-VL", "LLaVA"})
]
NATS = 1e-5
# What another image changes at least, in nats.
NOTICED = 0.05


def said(processor, reader, pictures, text):
    """A user's message with images as tokens."""
    tok, marks = processor.tokenizer, [{"type": "image"}] * len(pictures)
    content = [*marks, {"type": "text", "text": text}]
    ids = tok.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    images = [reader.read(each) for each in pictures]
    return reader.expand(list(ids), images), images


def sampled(family, change=None, prefill=8192):
    """Play three turns of four rows; return the largest difference to each row's own pass."""
    model, processor = vision_model(family)
    reader, tok = make_reader(model, processor), processor.tokenizer
    if change is not None:
        change(reader)
    ends = [tok.convert_tokens_to_ids("<|im_end|>")]
    settings = SamplingSettings(suppress_tokens=[reader.image_id])
    backend = CachedBackend(model, settings, ends, pad_token_id=tok.pad_token_id, reader=reader)
    backend.PREFILL_TOKENS = prefill
    # Two rows share their image; the others' have the same size, and so the same tokens.
    rows = [said(processor, reader, [picture(max(1, e), 24, 16)], " go on") for e in range(4)]
    turns = []
    with backend.running():
        for turn in range(3):
            for key, (ids, images) in enumerate(rows):
                seed = (0, key, turn)
                backend.add(TurnRequest(key, list(ids), 5 + key, seed, tuple(images)))
            while backend.busy:
                for result in backend.step():
                    ids, images = rows[result.key]
                    turns.append((result.key, len(ids), result.ids, result.logprobs))
                    shown = [picture(10 * turn + result.key, 8 + 8 * turn, 16), picture(50)]
                    more, seen = said(processor, reader, shown, "and")
                    rows[result.key] = (ids + result.ids + more, images + seen)
    tables = [own_table(model, make_reader(model, processor), *row) for row in rows]
    gaps = [
        (tables[key][torch.arange(at - 1, at - 1 + len(ids)), ids] - torch.tensor(logprobs)).abs()
        for key, at, ids, logprobs in turns
    ]
    return float(torch.cat(gaps).max())


@pytest.mark.parametrize("family", EVERY)
def test_cached_turns_equal_one_pass_over_the_whole_row(family):
    assert sampled(family) < NATS


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "SmolVLM in tiles"])
def test_a_prefill_in_parts_cuts_no_image(family):
    assert sampled(family, prefill=16) < NATS


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "LLaVA"])
def test_rows_compared_by_their_tokens_would_show_the_first_image_to_all(family):
    def by_tokens(reader):
        reader.keys = lambda ids, images, number=None: list(ids)

    assert sampled(family, by_tokens) > NOTICED


def test_positions_on_one_axis_are_noticed():
    def plain(reader):
        reader.positions = lambda ids, images: torch.arange(len(ids)).expand(3, -1)

    assert sampled("Qwen2.5-VL", plain) > NOTICED


@pytest.mark.parametrize("family", EVERY)
def test_packs_equal_padded_rows_equal_upstream_equal_single_rows(family, tmp_path):
    trainer = trained(vision_trainer(tmp_path, family, **ONE))
    assert trainer._forward.why_padded is None
    assert trainer._player.sampler.is_cached
    data, forward, model = trainer.data, trainer._forward, trainer.model.eval()
    mask = data["loss_mask"]
    sampled, old = (data[f"{name}_per_token_logps"][mask] for name in ("sampling", "old"))
    # The random models have unlikely tokens, whose numbers have fewer digits after the point.
    torch.testing.assert_close(sampled, old, atol=NATS, rtol=1e-6)
    with torch.no_grad():
        single, rows = own_logprobs(trainer), forward._rows(data)
        pack = rows.build([*range(8)])
        found = {"pack": forward._packed_logprobs(model, rows, [[*range(8)]])[0]}
        found["plan"] = forward.policy(model, data)[0]
        forward.why_padded = "to compare"
        found["padded"] = forward.policy(model, data, 3)[0]
        images, (ids, attended, length) = forward._images(data), forward._sequence(data)
        given = trainer.reader.upstream_inputs(images, ids)
        upstream = GRPOTrainer._get_per_token_logps_and_entropies
        for size in (None, 3):
            args = (model, ids, attended, length, size)
            found[f"upstream by {size}"] = upstream(trainer, *args, **given)[0]
        other = {**data, "images": data["images"].roll(1, 0)}
        wrong = own_logprobs_of_others(forward, model, other)
    # Images that rows share are in the pack once.
    assert len(pack.images) < sum(map(len, images))
    for name, logprobs in found.items():
        assert float((logprobs - single)[mask].abs().max()) < NATS, name
    if wrong is not None:
        assert float((wrong - single)[mask].abs().max()) > NOTICED


def own_logprobs_of_others(forward, model, batch):
    """The pass with another row's images; None if their tokens show it."""
    try:
        return forward.policy(model, batch)[0]
    except ValueError:
        return None


@pytest.mark.parametrize("family", EVERY)
def test_values_of_packs_equal_those_of_padded_rows(family, tmp_path):
    trainer = vision_trainer(tmp_path, family, **ONE)
    with torch.no_grad():
        torch.nn.init.normal_(trainer.critic.head.weight, std=0.1)
    trainer.train()
    data, forward, critic = trainer.data, trainer._forward, trainer.critic
    critic.model.eval()
    with torch.no_grad():
        wanted = torch.nn.functional.pad(data["completion_mask"], (1, 0), value=1).bool()
        rows = Rows(data, wanted, trainer.reader)
        pack = rows.build([*range(8)])
        mask = mask_of(pack, base_of(critic.model))
        hidden = critic.hidden_states(pack.input_ids, mask, **rows.inputs(pack))
        packed = rows.put_back([pack], [critic.score(hidden[:, rows.places(pack)])[0]])
        forward.why_padded = "to compare"
        padded = forward.values(data, 3)
    shown = wanted.bool()
    assert float(padded[shown].std()) > 0.01
    assert float((packed - padded)[shown].abs().max()) < NATS


@pytest.mark.parametrize("family", EVERY)
def test_a_step_is_the_same_over_any_split(family, tmp_path):
    whole = trained(vision_trainer(tmp_path / "1", family, **ONE))
    halves = trained(vision_trainer(tmp_path / "2", family, **TWO))
    assert torch.equal(whole.data["completion_ids"], halves.data["completion_ids"])
    largest = max(float(move.abs().max()) for move in whole.moved.values())
    assert largest > 0
    gaps = [float((move - halves.moved[name]).abs().max()) for name, move in whole.moved.items()]
    assert max(gaps) < 1e-4 * largest
    # The tower that reads images trains too.
    towers = [move for name, move in whole.moved.items() if "vis" in name]
    assert max(float(move.abs().max()) for move in towers) > 0
    pairs = zip(whole.critic_moved, halves.critic_moved, strict=True)
    largest = max(float(move.abs().max()) for move in whole.critic_moved)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-4 * largest


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen2.5-VL", "SmolVLM"])
def test_a_shared_critic_reads_images_by_its_adapter(family, tmp_path):
    from peft import LoraConfig

    def lora():
        return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

    whole = trained(vision_trainer(tmp_path / "1", family, peft_config=lora(), **ONE))
    halves = trained(vision_trainer(tmp_path / "2", family, peft_config=lora(), **TWO))
    assert whole._forward.why_padded is None
    assert whole._player.sampler.is_cached
    mask, data = whole.data["loss_mask"], whole.data
    assert float((data["sampling_per_token_logps"] - data["old_per_token_logps"])[mask].abs().max()) < NATS
    largest = max(float(move.abs().max()) for move in whole.moved.values())
    gaps = [float((move - halves.moved[name]).abs().max()) for name, move in whole.moved.items()]
    assert max(gaps) < 1e-4 * largest


@pytest.mark.parametrize(
    "family",
    [
        "Gemma 3",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("Gemma 4", "Qwen3.5", "Qwen2.5-VL")),
    ],
)
def test_turns_through_generate_train_on_the_same_images(family, tmp_path, monkeypatch):
    """Families without a cache: padded passes equal single rows, and the model reads the images."""
    from trl_stppo.trainer.loop.sampler import TurnSampler

    if family == "Qwen2.5-VL":
        monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "To compare.")
    trainer = trained(vision_trainer(tmp_path, family, **TWO))
    assert not trainer._player.sampler.is_cached
    assert [len(e.images) for e in trainer.played.episodes] == [3] * 8
    data, forward, model = trainer.data, trainer._forward, trainer.model.eval()
    mask = data["loss_mask"]
    with torch.no_grad():
        single = own_logprobs(trainer)
        found = forward.policy(model, data, 3)[0]
        other = {**data, "images": torch.full_like(data["images"], int(data["images"][0, 0]))}
        wrong = own_logprobs_of_others(forward, model, other)
    assert float((found - single)[mask].abs().max()) < NATS
    assert wrong is None or float((wrong - single)[mask].abs().max()) > NOTICED


def paid_by_letters(completions, **columns):
    """A reward function of letters; tags such as `<global-img>`, which upstream leaves out, do not count."""
    texts = [re.sub("<.*?>", "", each[-1]["content"]) for each in completions]
    return [sum(letter in "abcdefgh" for letter in text) / (1 + len(text)) for text in texts]


@pytest.mark.parametrize("family", AS_TRL)
def test_rows_with_images_without_a_critic_are_trls_grpo(family, tmp_path, monkeypatch):
    """The same pictures, episodes and weights: three steps of TRL's GRPOTrainer and of ours."""
    from trl import GRPOConfig

    from tests.kit.builders import QUICK, logs
    from trl_stppo import STGRPOConfig, STGRPOTrainer
    from trl_stppo.trainer.loop.sampler import TurnSampler

    # Otherwise ours draws each answer from a seed of its own.
    monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "As TRL does it.")
    settings = {**QUICK, "num_generations": 4, "max_steps": 3, "learning_rate": 1e-2}
    for name in ("critic_learning_rate", "num_mini_batches", "num_ppo_epochs"):
        del settings[name]
    settings |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    settings |= {"steps_per_generation": 1, "loss_type": "grpo", "num_iterations": 3}
    settings |= {"disable_dropout": True, "optim": "sgd"}

    def run(kind, config, shift=0):
        model, processor = vision_model(family)
        data = Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": f"say {i} "}] for i in range(8)],
                "images": [[picture(i + shift, 16, 24)] for i in range(8)],
            }
        )
        own = {"variant": "grpo"} if kind is STGRPOTrainer else {"importance_sampling_level": "token"}
        trainer = kind(
            model=model,
            reward_funcs=paid_by_letters,
            args=config(output_dir=str(tmp_path / kind.__name__), **settings, **own),
            train_dataset=data,
            processing_class=processor,
        )
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        moved = {n: p.detach() - start[n] for n, p in trainer.model.named_parameters()}
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        assert len(log) == 3
        assert logs(trainer)["reward"] > 0
        return moved, log

    (theirs, expected), (ours, log) = run(GRPOTrainer, GRPOConfig), run(STGRPOTrainer, STGRPOConfig)
    largest = max(float(move.abs().max()) for move in theirs.values())
    assert largest > 1e-4
    for name, move in theirs.items():
        assert float((move - ours[name]).abs().max()) < 1e-3 * largest, name
    for entry, other in zip(log, expected, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], abs=NATS)
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    _, changed = run(STGRPOTrainer, STGRPOConfig, shift=100)
    assert changed[0]["grad_norm"] != pytest.approx(expected[0]["grad_norm"], rel=1e-2)
