"""`trl-stppo estimate`: the memory model's figures, from few flags or from a training's."""

import re

import pytest
import transformers

from tests.kit.script_kit import AGENT, DEMO, ROOT
from tests.kit.tiers import quick
from trl_stppo.cli.estimate import translated
from trl_stppo.cli.main import main

QWEN = ("--model", "Qwen/Qwen2.5-7B-Instruct", "--rows", "1", "--length", "4096")
BF16 = (("--bf16", "true"), ("--bf16", "false"))


@pytest.fixture
def shown(capsys, monkeypatch):
    """Runs the command, which must load no weights; gives the exit code and what it prints."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> tuple[int, str]:
        code = main(["estimate", *words])
        return code, re.sub(r"[ │┃]+", " ", "".join(capsys.readouterr()))

    return run


def peak(text: str) -> float:
    return float(re.search(r"peak: about ([\d.]+) GiB", text)[1])


def test_a_model_and_a_method_are_enough(shown):
    words = ("--generation_slots", "8", "--optim", "paged_adamw_8bit")
    code, text = shown(
        *QWEN, "--qlora", *words, "--variant", "ppo", "--gradient_accumulation_steps", "8"
    )
    assert code == 0
    assert peak(text) == pytest.approx(10.5, abs=0.2)  # docs/one_gpu.md, with a buffer more
    assert "LoRA of rank 16 on 4-bit weights, bfloat16" in text
    for phase in ("rollout", "scoring", "update", "optimizer step"):
        assert f" {phase} " in text
    assert "smallest common card: " in text


def test_a_cards_default_is_bf16_also_on_a_machine_without_one(shown):
    words = ("--model", AGENT)
    default, half, whole = (peak(shown(*words, *b)[1]) for b in ((), *BF16))
    assert default == half < whole


@pytest.mark.slow
def test_methods_differ_as_they_should(shown):
    peaks = [peak(shown(*QWEN, *words)[1]) for words in (("--qlora",), ("--lora",), ())]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.2 * peaks[2]


@pytest.mark.parametrize(
    ("card", "code"), quick([("24", 0), ("24GB", 0), ("8", 1)], ("24GB", 0), ("8", 1))
)
def test_a_card_is_enough_or_not(card, code, shown):
    found, text = shown(*QWEN, "--qlora", "--card", card)
    assert found == code
    assert ("does not fit" in text) == bool(code)
    assert ("max_completion_length=2048 (saves" in text) == bool(code)
    if card == "24":
        assert text.splitlines()[-1] in (ROOT / "docs" / "one_gpu.md").read_text()


def test_a_trainings_file_gives_what_its_dry_run_says(shown, capsys):
    path = str(ROOT / "scripts" / "configs" / "single_gpu_24gb.yaml")
    assert peak(shown("--config", path)[1]) == 13.1  # docs/one_gpu.md
    demo = shown("--config", DEMO)[1]
    assert "prompts of " in demo
    assert "fits a 16 GB card" in shown("--config", DEMO, "--card", "16")[1]
    assert main(["train", "--config", DEMO, "--dry_run"]) == 0
    assert f"peak: about {peak(demo):.1f} GiB" in re.sub(r"[ │]+", " ", capsys.readouterr().out)


def test_engines_share_out(shown):
    one, eight = shown(*QWEN)[1], shown(*QWEN, "--accelerate_config", "zero3")[1]
    assert peak(eight) < 0.75 * peak(one)
    assert "each of 8 processes, ZeRO-3" in eight


def test_a_model_that_is_not_known_is_said_to_be(shown):
    code, text = shown("--model", "someone/nothing")
    assert code == 1
    assert "someone/nothing" in text


def test_short_flags_stand_for_those_of_a_training():
    words, card = translated(
        ["--model=a/b", "--length", "9", "--card=24gb", "--seed", "1", "--lora"]
    )
    assert card == 24
    assert words[:4] == ["--max_completion_length", "9", "--model_name_or_path", "a/b"]
    assert words[4:6] == ["--use_peft", "true"]
    assert words[-2:] == ["--seed", "1"], "behind, where they beat what short ones stand for"
