"""Published configurations of Qwen2.5, as the Hub would give them; a conftest imports the fixture."""

from typing import Any

import pytest
from transformers import Qwen2Config

from trl_stppo.cli import planned

NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
QWEN25 = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True), "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True), "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False), "32B": (5120, 27648, 64, 40, 8, 152064, False),
}  # fmt: skip


def qwen25(size: str) -> Qwen2Config:
    return Qwen2Config(**dict(zip(NAMES, QWEN25[size], strict=True)))


@pytest.fixture(autouse=True)
def on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of Qwen2.5 are known, without a network."""
    here = planned.local_config

    def config(name: str, *args: Any, **options: Any) -> Any:
        size = name.removeprefix("Qwen/Qwen2.5-").removesuffix("-Instruct")
        return qwen25(size) if size in QWEN25 else here(name, *args, **options)

    monkeypatch.setattr(planned, "local_config", config)
