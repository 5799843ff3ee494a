"""`variant` and the two fields it stands for; which corrections fit which optimizer."""

from __future__ import annotations

import math
import re

import pytest
from transformers.training_args import OptimizerNames
from trl import TrlParser

from trl_stppo import STGRPOConfig, STPPOConfig


def config(kind=STPPOConfig, **options) -> STPPOConfig:
    return kind(output_dir="out", use_cpu=True, bf16=False, report_to="none", **options)


@pytest.mark.parametrize(
    ("variant", "level", "mode"),
    [
        ("ppo", "token", "none"),
        ("turn-ppo", "turn", "none"),
        ("s-ppo", "token", "share"),
        ("st-ppo", "turn", "share"),
    ],
)
def test_a_variant_sets_ratio_level_and_correction(variant, level, mode):
    args = config(variant=variant)
    assert (args.importance_sampling_level, args.clip_bias_normalization) == (level, mode)
    assert args.clip_bias_target == "update"
    assert args.measures_clip_bias is (mode != "none")
    repeated = config(
        variant=variant, importance_sampling_level=level, clip_bias_normalization=mode
    )
    assert repeated.importance_sampling_level == level


def test_st_ppo_is_the_default():
    assert config().variant == "st-ppo"


@pytest.mark.parametrize(
    ("variant", "options", "named"),
    [
        ("ppo", {"importance_sampling_level": "turn"}, "importance_sampling_level='turn'"),
        ("ppo", {"clip_bias_normalization": "share"}, "clip_bias_normalization='share'"),
        ("turn-ppo", {"importance_sampling_level": "token"}, "importance_sampling_level='token'"),
        ("turn-ppo", {"clip_bias_normalization": "relative"}, "clip_bias_normalization='relative'"),
        ("s-ppo", {"importance_sampling_level": "turn"}, "importance_sampling_level='turn'"),
        ("s-ppo", {"clip_bias_normalization": "none"}, "clip_bias_normalization='none'"),
        ("st-ppo", {"importance_sampling_level": "sequence"}, "importance_sampling_level='seq"),
        ("st-ppo", {"clip_bias_normalization": "none"}, "clip_bias_normalization='none'"),
    ],
)
def test_a_field_that_contradicts_the_variant_raises_with_both(variant, options, named):
    with pytest.raises(ValueError, match=f"`{named}.*contradicts `variant='{variant}'`"):
        config(variant=variant, **options)


@pytest.mark.parametrize(
    ("kind", "level", "variant", "mode"),
    [
        (STPPOConfig, "token", "s-ppo", "share"),
        (STPPOConfig, "turn", "st-ppo", "share"),
        (STPPOConfig, "sequence", None, "none"),
        (STGRPOConfig, "token", "grpo", "none"),
        (STGRPOConfig, "sequence", "gspo", "none"),
        (STGRPOConfig, "turn", "st-grpo", "share"),
    ],
)
@pytest.mark.parametrize("typed", [True, False])
def test_a_level_alone_chooses_the_variant(kind, level, variant, mode, typed):
    """From the command line too, where the parser hands the default of `variant` on."""
    if typed:
        words = f"--output_dir out --use_cpu --bf16 false --importance_sampling_level {level}"
        (args,) = TrlParser((kind,)).parse_args_and_config(words.split())
    else:
        args = config(kind, importance_sampling_level=level)
    found = args.variant, args.importance_sampling_level, args.clip_bias_normalization
    assert found == (variant, level, mode)
    assert type(args.variant) in (str, type(None))


@pytest.mark.parametrize(
    ("kind", "level", "mode", "variant"),
    [
        (STPPOConfig, "token", "none", "ppo"),
        (STPPOConfig, "turn", "none", "turn-ppo"),
        (STPPOConfig, "token", "relative", "s-ppo"),
        (STPPOConfig, "sequence", "share", None),
        (STGRPOConfig, "token", "share", "s-grpo"),
        (STGRPOConfig, "turn", "none", "turn-grpo"),
    ],
)
def test_a_level_and_a_correction_choose_it_together(kind, level, mode, variant):
    args = config(kind, importance_sampling_level=level, clip_bias_normalization=mode)
    found = args.variant, args.importance_sampling_level, args.clip_bias_normalization
    assert found == (variant, level, mode)


def test_a_variant_that_is_typed_stands_even_if_it_is_the_default():
    words = "--output_dir out --use_cpu --bf16 false --variant st-ppo --importance_sampling_level"
    with pytest.raises(ValueError, match="`importance_sampling_level='token'` contradicts"):
        TrlParser((STPPOConfig,)).parse_args_and_config([*words.split(), "token"])
    with pytest.raises(ValueError, match="`clip_bias_normalization='none'` contradicts"):
        config(clip_bias_normalization="none")
    with pytest.raises(ValueError, match=r"`importance_sampling_level='word'`: allowed are"):
        config(importance_sampling_level="word")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"importance_sampling_level": "turn"}, "fits: 'turn-grpo', 'st-grpo', 'turn-rloo'"),
        (
            {"clip_bias_normalization": "share"},
            "fits: 's-grpo', 's-rloo', 's-rebn'; or set",
        ),
        ({"importance_sampling_level": "sequence"}, "Choose the variant that fits: 'gspo'; or set"),
        ({"importance_sampling_level": "word"}, "means 'token'. Set variant=None."),
    ],
)
def test_a_contradiction_names_the_variants_that_fit(options, advice):
    with pytest.raises(ValueError, match=advice):
        config(STGRPOConfig, variant="rebn", **options)


def test_unknown_variants_and_modes_list_what_is_allowed():
    with pytest.raises(ValueError, match="`variant='sorl'`: allowed are 'ppo', 'turn-ppo'"):
        config(variant="sorl")
    with pytest.raises(ValueError, match="`clip_bias_normalization='on'`: allowed are 'none'"):
        config(clip_bias_normalization="on")


def test_without_a_variant_the_two_fields_are_free():
    plain = config(variant=None)
    assert (plain.importance_sampling_level, plain.clip_bias_normalization) == ("turn", "none")
    free = config(
        variant=None, importance_sampling_level="sequence", clip_bias_normalization="relative"
    )
    assert free.importance_sampling_level == "sequence"
    assert free.clip_bias_normalization == "relative"


@pytest.mark.parametrize("mode", ["triggered", "floor", "relative", "share"])
def test_every_mode_works_on_the_gradient(mode):
    args = config(clip_bias_normalization=mode, clip_bias_target="gradient")
    assert args.clip_bias_normalization == mode


@pytest.mark.parametrize("mode", ["triggered", "floor"])
def test_modes_with_the_unit_of_a_gradient_cannot_scale_the_update(mode):
    message = f"`clip_bias_normalization='{mode}'` has the unit of a gradient.*clip_bias_target"
    with pytest.raises(ValueError, match=message):
        config(clip_bias_normalization=mode)


@pytest.mark.parametrize("limit", [0.0, None, math.inf])
def test_triggered_needs_the_gradient_clip(limit):
    with pytest.raises(ValueError, match="'triggered'` needs `max_grad_norm` > 0"):
        config(
            clip_bias_normalization="triggered",
            clip_bias_target="gradient",
            max_grad_norm=limit,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_bias_power": 0.0}, "`clip_bias_power=0.0`: must be positive"),
        ({"clip_bias_power": -1.0}, "`clip_bias_power=-1.0`: must be positive"),
        ({"clip_bias_target": "loss"}, "`clip_bias_target='loss'`: allowed are 'gradient'"),
    ],
)
def test_values_out_of_range_raise_by_name(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**options)


def test_the_bias_can_be_measured_without_being_corrected():
    assert config(variant="ppo", clip_bias_estimator="auto").measures_clip_bias is True
    assert config(variant="ppo").measures_clip_bias is False


ACCEPTED = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "paged_adamw_8bit",
    "sgd",
    "adafactor",
)
REFUSED = (
    "lomo",
    "adalomo",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
    "galore_adamw",
    "galore_adafactor",
    "galore_adafactor_layerwise",
    "apollo_adamw",
    "apollo_adamw_layerwise",
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_optimizers_whose_step_is_proportional_to_the_rate_can_be_scaled(name):
    assert config(optim=name).clip_bias_target == "update"


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_whose_step_is_not_are_refused_for_the_update_only(name):
    if "lomo" in name or "layerwise" in name:
        for options in ({}, {"clip_bias_target": "gradient"}, {"variant": "turn-ppo"}):
            with pytest.raises(
                ValueError, match=f"`optim='{name}'` is not supported: it steps inside"
            ):
                config(optim=name, **options)
        return
    with pytest.raises(
        ValueError, match=f"`clip_bias_target='update'` with the optimizer '{name}'"
    ):
        config(optim=name)
    assert config(optim=name, clip_bias_target="gradient").optim == name
    assert config(optim=name, variant="turn-ppo").optim == name


def test_each_optimizer_of_transformers_has_been_decided_on():
    """A new family must be put into one of the two lists of `stppo_config.py` after a look at it."""
    known = (*ACCEPTED, *REFUSED)
    families = ("adamw", "rmsprop", "lion", "ademamix", "adagrad")
    undecided = {
        o.value
        for o in OptimizerNames
        if o not in known and not any(f in o.value for f in families)
    }
    assert undecided == set()


def test_unknown_optimizers_are_refused():
    with pytest.raises(ValueError, match="magic is not a valid OptimizerNames"):
        config(optim="magic")
