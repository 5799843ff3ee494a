"""Runs TRL's `tests/test_grpo_trainer.py` with our trainers in place of GRPOTrainer.

The tests run in a pytest of their own, of which this module is a plugin too: it puts our classes, and data
sets made here, where the test module has TRL's names. Models come from a Hub cache of tiny random ones.
"""

import codecs
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import transformers
import trl
from datasets import Dataset, DatasetDict
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl import import_utils
from trl.chat_template_utils import qwen3_chat_template

import trl_stppo
from tests.kit.vision import picture, vision_model
from trl_stppo.trainer.loop.sampler import TurnSampler

ROOT = Path(__file__).resolve().parents[2]
FILES = ("__init__.py", "conftest.py", "testing_utils.py", "testing_constants.py")
SUITE = "test_grpo_trainer.py"
# Tests without a trainer, and those that need a GPU.
LEFT_OUT = ("TestTransformersContinuousBatchingContract", "TestGRPOTrainerSlow")
TRAINER, REPORT = "DROPIN_TRAINER", "DROPIN_REPORT"


def run(folder: Path, trainer: str, work: Path) -> dict[str, str]:
    """Outcome of each test that is not skipped: "passed", or the exception that it ended with.

    `folder` is TRL's `tests`, `trainer` "STPPO", "STGRPO" or "GRPO" for TRL's own, `work` an empty folder.
    """
    # The copy has another name because `tests` are ours.
    copy = work / "trl_suite"
    copy.mkdir(parents=True)
    for name in FILES:
        shutil.copy(folder / name, copy)
    (copy / SUITE).write_text(with_our_ids((folder / SUITE).read_text()))
    (work / "pytest.ini").write_text("[pytest]\naddopts = -q -p tests.kit.dropin_suite\n")
    fill_hub(work / "hub")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(work / "hub"), "HF_MODULES_CACHE": str(work / "modules"),
        TRAINER: trainer, REPORT: str(work / "report.json"),
    }  # fmt: skip
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "pytest.ini"]
    words += ["--basetemp", "tmp", str(copy / SUITE)]
    with (work / "log.txt").open("w") as log:
        done = subprocess.run(words, cwd=work, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"The tests did not run:\n{(work / 'log.txt').read_text()[-3000:]}")
    return json.loads((work / "report.json").read_text())


PIECES = {
    **{314: " {", 330: ' "', 397: ">\n", 411: "out", 450: "dec", 497: '",', 522: "</", 606: "name"},
    **{788: '":', 894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don"},
    **{2765: " won", 4913: '{"', 5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 293: " b"},
    **{
        7692: "async",
        9520: "step",
        11248: "}}\n",
        13477: "rement",
        14172: "tool",
        16252: " increment",
    },
    **{16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment", 64648: "multiply"},
    **{93054: "_multiply", 95642: '"}}\n', 151643: "<|endoftext|>", 151645: "<|im_end|>"},
    **{151657: "<tool_call>", 151658: "</tool_call>"},
}
MARKERS = (
    *("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<image>"),
    *("<tool_response>", "</tool_response>", " got an unexpected keyword argument "),
)
SMALL = {
    "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.5,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 8},
    "Glm4MoeForCausalLM": {"n_routed_experts": 4, "head_dim": 2, **EXPERTS},
    "GptOssForCausalLM": {"num_local_experts": 4, **EXPERTS},
    "LlamaForSequenceClassification-3.2": {"num_labels": 1},
    "NemotronHForCausalLM-nano": {
        "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16, "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False, **EXPERTS,
    },
    "Qwen2ForCausalLM-2.5": {},
    "Qwen2ForSequenceClassification-2.5": {"num_labels": 1},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Qwen3ForSequenceClassification": {"head_dim": 8, "num_labels": 1},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "head_dim": 8, **EXPERTS},
}  # fmt: skip
WITH_IMAGES = {
    "Gemma3": "Gemma 3", "Gemma4": "Gemma 4", "Llava": "LLaVA", "LlavaNext": "LLaVA-NeXT",
    "Qwen2_5_VL": "Qwen2.5-VL", "Qwen2VL": "Qwen2-VL", "SmolVLM": "SmolVLM",
    "Qwen3_5-NoThink": "Qwen3.5", "Qwen3_5Moe-3.6": "Qwen3.5 MoE",
}  # fmt: skip
OWNER = "trl-internal-testing"
REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""


def tokenizer() -> transformers.Qwen2Tokenizer:
    """Bytes as Qwen numbers them, and behind them the pieces that the tests' own generations use."""
    alphabet = bytes_to_unicode()
    vocab = {letter: i for i, letter in enumerate(alphabet.values())}
    for text in PIECES.values():
        if text not in MARKERS:
            vocab["".join(alphabet[byte] for byte in text.encode())] = len(vocab)
    made = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.add_tokens(list(MARKERS))
    return made


def with_our_ids(source: str) -> str:
    """TRL's test file, with the ids of Qwen's vocabulary in it replaced by those of `tokenizer()`."""
    known = tokenizer()
    pieces = [known.decode([i]) for i in range(len(known))]
    ours = {theirs: pieces.index(text) for theirs, text in PIECES.items()}

    def replaced(match: re.Match[str]) -> str:
        ids = [int(number) for number in match[1].split(", ")]
        return str([ours.get(i, i) for i in ids]) if max(ids) > 255 else match[0]

    return re.sub(r"\[(\d+(?:, \d+)+)\]", replaced, source)


def fill_hub(cache: Path) -> None:
    """Models where transformers keeps those that it has downloaded."""
    words = tokenizer()
    words.chat_template = qwen3_chat_template
    for name, special in MODELS.items():
        kind = getattr(transformers, name.split("-")[0])
        save(cache, f"tiny-{name}", words, kind, **special)
    folder = save(cache, "tiny-RemoteForCausalLM", words, transformers.Qwen2ForCausalLM)
    (folder / "remote.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    config.update(model_type="remote", architectures=["RemoteForCausalLM"], auto_map=code)
    (folder / "config.json").write_text(json.dumps(config))
    for name, family in WITH_IMAGES.items():
        vision_model(family)[0].save_pretrained(snapshot(cache, seeing(name)))


def seeing(name: str) -> str:
    """TRL's name of a model that reads images."""
    family, *suffix = name.split("-")
    return "-".join([f"tiny-{family}ForConditionalGeneration", *suffix])


loaded = transformers.AutoProcessor.from_pretrained


def processor(name: str, *args: Any, **options: Any) -> Any:
    """Stands in for AutoProcessor, which needs torchvision for these."""
    families = {f"{OWNER}/{seeing(each)}": family for each, family in WITH_IMAGES.items()}
    return vision_model(families[name])[1] if name in families else loaded(name, *args, **options)


def save(cache: Path, name: str, words: Any, kind: Any, **special: Any) -> Path:
    """A random model and its tokenizer; returns their folder."""
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SMALL, **ids, "vocab_size": len(words), **special}))
    folder = snapshot(cache, name)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def snapshot(cache: Path, name: str) -> Path:
    """The folder of a model in a Hub cache."""
    revision = "0" * 40
    folder = cache / f"models--{OWNER}--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots" / revision).mkdir(parents=True)
    return folder / "snapshots" / revision


def load_dataset(path: str, name: str, split: str | None = None, streaming: bool = False) -> Any:
    """Stands in for `zen` and its kin: the beginnings of the lines of Python's Zen, in their order."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    starts = zip(lines, (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 6, 11, 2, 4, 7, 5, 5), strict=True)
    prompts: list[Any] = [" ".join(line.split()[:words]) for line, words in starts]
    if name == "conversational_prompt_only":
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    columns = {"prompt": prompts}
    if "image" in path:
        several = "multi" in path
        seen = [picture(number, 24, 16) for number in range(len(prompts))]
        columns |= {"images": [[each, each] for each in seen]} if several else {"image": seen}
    data = Dataset.from_dict(columns)
    parts = DatasetDict(train=data.select(range(17)), test=data.select(range(17, 19)))
    chosen = parts if split is None else parts[split]
    return chosen.to_iterable_dataset() if streaming else chosen


if TRAINER in os.environ:
    import_utils.is_jmespath_available = lambda: True
    import_utils.is_joblib_available = lambda: False
    transformers.AutoProcessor.from_pretrained = processor


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Put ours where the test module has TRL's names."""
    items[:] = [item for item in items if item.cls.__name__ not in LEFT_OUT]
    if not items:
        return
    module, name = items[0].module, os.environ[TRAINER]
    module.load_dataset = load_dataset
    trl.GRPOConfig.__post_init__ = shorter(trl.GRPOConfig.__post_init__)
    if name != "GRPO":
        module.GRPOTrainer = getattr(trl_stppo, f"{name}Trainer")
        module.GRPOConfig = getattr(trl_stppo, f"{name}Config")
        TurnSampler.why_not_cached = why_not_cached


def shorter(settle: Any) -> Any:
    """Settings with a few steps in place of three epochs; the test that counts steps does not shuffle."""

    def __post_init__(self: Any) -> None:
        if self.shuffle_dataset:
            self.num_train_epochs = 0.3
        settle(self)

    return __post_init__


def why_not_cached(self: TurnSampler) -> str | None:
    """The trainers' own answer, unless the test has put a function of its own in `generate`."""
    model = self.accelerator.unwrap_model(self.policy())
    return "The test samples." if isinstance(model.generate, Mock) else own_answer(self)


own_answer = TurnSampler.why_not_cached
outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """Keep how a test ended; one that fails may do so in any of its three phases."""
    name = report.nodeid.partition("::")[2].replace("trl-internal-testing/tiny-", "")
    if report.failed:
        outcomes[name] = report.longrepr.reprcrash.message
    elif report.passed and report.when == "call":
        outcomes[name] = "passed"


def pytest_sessionfinish() -> None:
    """Hand the outcomes over."""
    Path(os.environ[REPORT]).write_text(json.dumps(outcomes))
