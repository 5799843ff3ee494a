"""What `trl-stppo doctor` measures, and why it leaves some of it out."""

from __future__ import annotations

from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "bitsandbytes",
    "vllm",
    "flash-attn",
)
# Below this no measurement is begun: imports alone take a good part of it.
LEAST_SECONDS = 30
SHORT = {"tokens": 2048, "episodes": 4, "turn_tokens": 64, "steps": 4, "measure": "training"}
LONG = {**SHORT, "tokens": 4096, "episodes": 2}
FULL = {"method": "full", "model": "0.5B", "what": "full, bf16 autocast"}
LORA = {"method": "lora", "model": "1.5B", "what": "LoRA, bf16"}
QLORA = {"method": "qlora", "model": "7B", "what": "QLoRA", "needs": "bitsandbytes"}
PROMPTS = {"prompts": [[100 + row] * 512 for row in range(16)], "turn_tokens": 128, "model": "1.5B"}
FLASH = {"needs": "flash-attn", "flags": ["--attn_implementation", "flash_attention_2"]}
# Name -> what is measured; the most telling first, as the budget may end.
ROWS: dict[str, dict[str, Any]] = {
    "full-2k": FULL | SHORT,
    "lora-2k": LORA | SHORT,
    "qlora-2k": QLORA | SHORT,
    "sampler": PROMPTS | {"measure": "sampling", "what": "our sampler and `generate`"},
    "ddp": FULL | SHORT | {"devices": 2, "steps": 1},
    "qlora-4k": QLORA | LONG,
    "lora-4k": LORA | LONG,
    "full-4k": FULL | LONG,
    "flash-4k": LORA | LONG | FLASH,
    "vllm": PROMPTS | {"measure": "vllm", "what": "vLLM", "needs": "vllm"},
}
TINY = {"tokens": 64, "episodes": 2, "turn_tokens": 4, "steps": 2, "prompts": [[100] * 8] * 2}


def why_not(spec: dict[str, Any], facts: dict[str, Any], seconds: float) -> str | None:
    """Why a measurement is left out, if it is; `seconds` are left."""
    machine, needs, devices = facts["machine"], spec.get("needs"), spec.get("devices", 1)
    if "devices" not in machine:
        return "the machine could not be examined"
    if needs and facts["versions"][needs] is None:
        return f"{needs} is not installed"
    if devices > max(1, machine["devices"]):
        return f"needs {devices} GPUs, there are {machine['devices']}"
    if spec["miniature"] and needs in ("vllm", "flash-attn"):
        return "needs a GPU"
    if "unfit" in machine:
        return str(machine["unfit"])
    return "no time left" if seconds < LEAST_SECONDS else None
