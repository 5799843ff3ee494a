"""Names of 0.1.0 go on to work, typed or in what it has written; others mean nothing and say so."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from dataclasses import dataclass, fields

import pytest
import torch
import yaml
from trl import GRPOConfig

from tests.fixtures.v0_1_0 import recipe
from trl_stppo import PPOConfig, STGRPOConfig, STPPOConfig
from trl_stppo.cli.flags import divided, read_flags
from trl_stppo.cli.usage import UsageError
from trl_stppo.trainer.config.names import IGNORED, OLD_NAMES, renamed

BASE = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"}

# Settings of 0.1.0, and what they are now.
CASES = {
    "all limits": (
        {
            **{"min_valid_action_rate": 0.5, "min_reward_std": 0.01, "max_clip_bias_ratio": 3.0},
            "collapse_patience": 7,
        },
        {
            "stop_when": [
                "turns/valid_action_rate < 0.5 for 7",
                "reward_std < 0.01 for 7",
                "clip_bias/share < 0.25 for 7",  # C > 3 g is g / (g + C) < 1 / 4
            ]
        },
    ),
    "one limit": ({"min_reward_std": 1e-3}, {"stop_when": ["reward_std < 0.001 for 5"]}),
    "patience alone": ({"collapse_patience": 7}, {"stop_when": None}),
    "no limits": ({"min_reward_std": None}, {"stop_when": None}),
    "no bound": ({"max_clip_bias_ratio": math.inf}, {"stop_when": None}),
    "evaluation": (
        {"eval_temperature": 0.5, "eval_top_k": 3, "eval_max_completion_length": 20},
        {
            "eval_generation_kwargs": {"temperature": 0.5, "top_k": 3, "max_completion_length": 20},
        },
    ),
    "greedy": (
        {"eval_temperature": 0.0, "eval_top_p": None},
        {"eval_generation_kwargs": {"temperature": 0.0}},
    ),
    "no handler": ({"save_on_signal": False}, {"enable_jit_checkpoint": False}),
    "handler": ({"save_on_signal": True}, {"enable_jit_checkpoint": True}),
    "measured": ({"log_clip_bias": True}, {"clip_bias_estimator": "auto", "measures_clip_bias": True}),
    "measured by an estimate": (
        {"log_clip_bias": True, "clip_bias_estimator": "logits"},
        {"clip_bias_estimator": "logits"},
    ),
    "price": (
        {"on_env_error": "penalise", "env_error_penalty": 0.25},
        {"on_env_error": "penalise 0.25"},
    ),
    "no price": ({"on_env_error": "mask", "env_error_penalty": 0.25}, {"on_env_error": "mask"}),
}  # fmt: skip


def check(args, expected):
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("case", CASES)
def test_old_names_mean_the_same_in_python(case):
    old, expected = CASES[case]
    with pytest.warns(DeprecationWarning, match=r"Old names go in 0\.3") as caught:
        args = STPPOConfig(**BASE, **old)
    assert caught[0].filename == __file__, "it points to whoever has written the name"
    check(args, expected)
    check(copy.deepcopy(args), expected)


@pytest.mark.parametrize("source", ["flags", "words with =", "file", "both"])
@pytest.mark.parametrize("case", CASES)
def test_old_names_mean_the_same_in_flags_and_files(case, source, tmp_path):
    old, expected = CASES[case]
    filed = dict(list(old.items())[1:]) if source == "both" else old if source == "file" else {}
    typed = {name: value for name, value in old.items() if name not in filed}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**BASE, **filed}))
    words = ["--config", str(tmp_path / "run.yaml")]
    for name, value in typed.items():
        text = "null" if value is None else str(value)
        words += [f"--{name}={text}"] if source == "words with =" else [f"--{name}", text]
    with pytest.warns(DeprecationWarning, match=r"Old names go in 0\.3"):
        (args,) = read_flags([STPPOConfig], words)
    check(args, expected)
    with warnings.catch_warnings(action="ignore"):
        assert divided([STPPOConfig], words)[1] == [], "nothing of it is the launcher's"


def test_switches_without_a_value():
    words = ["--output_dir", "out", "--bf16", "false", "--report_to", "none"]
    with pytest.warns(DeprecationWarning, match="save_on_signal"):
        (args,) = read_flags([STPPOConfig], [*words, "--log_clip_bias", "--no_save_on_signal"])
    check(args, {"clip_bias_estimator": "auto", "enable_jit_checkpoint": False, "max_turns": None})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"min_reward_std": 0.1, "stop_when": "reward_std < 0.2"},
            "`min_reward_std=0.1` contradicts `stop_when=reward_std < 0.2`, its name since 0.2",
        ),
        (
            {"eval_temperature": 0.1, "eval_generation_kwargs": {"top_k": 3}},
            "`eval_temperature=0.1` contradicts `eval_generation_kwargs=",
        ),
        ({"save_on_signal": False, "enable_jit_checkpoint": True}, "Set only enable_jit_checkpoint"),
        ({"env_error_penalty": 0.5, "on_env_error": "penalise 2"}, "Set only on_env_error"),
    ],
)  # fmt: skip
def test_old_and_new_names_must_not_contradict(options, said, tmp_path):
    with pytest.raises(ValueError, match="Set only") as error:
        STPPOConfig(**BASE, **options)
    assert said in str(error.value)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**BASE, **options}))
    with pytest.raises(UsageError, match="Set only"):
        read_flags([STPPOConfig], ["--config", str(tmp_path / "run.yaml")])
    old, new = sorted(options, key=lambda name: name not in OLD_NAMES)
    words = [f"--{old}", str(options[old]), f"--{new}", str(options[new])]
    with pytest.raises(UsageError, match="Set only"):
        read_flags([STPPOConfig], words)


def test_the_same_under_both_names_is_no_contradiction():
    with pytest.warns(DeprecationWarning, match="save_on_signal"):
        args = PPOConfig(**BASE, save_on_signal=False, enable_jit_checkpoint=False)
    assert args.enable_jit_checkpoint is False


def test_names_of_ppo_that_mean_nothing_here_are_kept_for_scripts(caplog):
    assert PPOConfig(**BASE).dataset_num_proc is None
    given = {"dataset_num_proc": 4, "model_adapter_name": "default", "ref_adapter_name": "ref",
             "num_sample_generations": 10}  # fmt: skip
    assert given.keys() == IGNORED.keys()
    args = PPOConfig(**BASE, **given)
    assert {name: getattr(args, name) for name in given} == given
    assert "`num_sample_generations=10` is ignored: log_completions=True" in caplog.text
    caplog.clear()
    PPOConfig(**BASE, dataset_num_proc=None, num_sample_generations=0)
    assert not caplog.text
    words = [
        word for name, value in {**BASE, **given}.items() for word in (f"--{name}", str(value))
    ]
    (args,) = read_flags([STPPOConfig], words)
    assert "`dataset_num_proc=4` is ignored" in caplog.text
    assert args.report_to == []


def test_what_has_gone_and_was_off_is_passed_over():
    assert not hasattr(PPOConfig(**BASE, live_view=False), "live_view")  # as 0.1.0 has written it
    with pytest.raises(TypeError, match="There is none here"):
        PPOConfig(**BASE, live_view=True)


@dataclass
class Wider(PPOConfig):
    """As users write them: its constructor is generated anew."""

    mine: int = 0


def test_a_dataclass_of_ones_own_is_told_the_new_name():
    assert Wider(**BASE, mine=2, stop_when="reward_std < 1").mine == 2
    with pytest.raises(TypeError, match=r"Since 0\.2 it is `stop_when`"):
        Wider(**BASE, min_reward_std=0.1)


def test_what_0_1_0_has_pickled_and_noted_has_todays_names(tmp_path):
    found = recipe.unpacked("full", tmp_path) / "run" / "checkpoint-9"
    args = torch.load(found / "training_args.bin", weights_only=False)
    assert type(args) is STPPOConfig
    assert not OLD_NAMES.keys() & vars(args).keys()
    check(args, {"stop_when": None, "eval_generation_kwargs": None, "enable_jit_checkpoint": True})
    check(args, {"clip_bias_estimator": None, "on_env_error": "mask", "measures_clip_bias": True})
    # The same with every old setting another one than its default.
    state = {**vars(args), **{n: v for old, _ in CASES.values() for n, v in old.items()}}
    state |= CASES["all limits"][0] | CASES["evaluation"][0] | CASES["price"][0]
    other = copy.copy(args)
    with warnings.catch_warnings(action="error"):
        other.__setstate__(state)
    check(other, {**CASES["all limits"][1], **CASES["evaluation"][1], **CASES["price"][1]})
    assert pickle.loads(pickle.dumps(other)).stop_when == CASES["all limits"][1]["stop_when"]
    assert renamed({"log_clip_bias": True, "clip_bias_normalization": "share"}) == {
        "clip_bias_normalization": "share"
    }


def test_how_many_settings_are_our_own():
    """More than anybody can hold is too many: what comes in, something has to make room for."""
    upstream = {spec.name for spec in fields(GRPOConfig)}
    ours = {spec.name for spec in fields(STPPOConfig)} - upstream
    assert len(ours) <= 48, sorted(ours)
    assert {spec.name for spec in fields(STGRPOConfig)} - upstream == ours
    assert not ours & (OLD_NAMES.keys() | IGNORED.keys())
