"""`variant` and the two fields it stands for; which corrections fit which optimizer."""

import re

import pytest
from transformers.training_args import OptimizerNames
from trl import TrlParser

from trl_stppo import STGRPOConfig, STPPOConfig

DEFAULT = ["share"]


def config(kind=STPPOConfig, **options) -> STPPOConfig:
    return kind(output_dir="out", use_cpu=True, bf16=False, report_to="none", **options)


@pytest.mark.parametrize(("variant", "level", "stabilizers"), [
    ("ppo", "token", []),
    ("turn-ppo", "turn", []),
    ("s-ppo", "token", DEFAULT),
    ("st-ppo", "turn", DEFAULT),
])  # fmt: skip
def test_a_variant_sets_ratio_level_and_stabilizers(variant, level, stabilizers):
    args = config(variant=variant)
    assert (args.importance_sampling_level, args.stabilizers) == (level, stabilizers)
    assert args.measures_clip_bias is bool(stabilizers)
    assert args.takes_second_gradient is bool(stabilizers)
    repeated = config(
        variant=variant, importance_sampling_level=level, stabilizers=stabilizers or "none"
    )
    assert (repeated.importance_sampling_level, repeated.stabilizers) == (level, stabilizers)


def test_st_ppo_is_the_default():
    assert config().variant == "st-ppo"


@pytest.mark.parametrize(("variant", "options", "named"), [
    ("ppo", {"importance_sampling_level": "turn"}, "importance_sampling_level='turn'"),
    ("turn-ppo", {"stabilizers": "winners"}, "stabilizers=['winners']"),
    ("s-ppo", {"stabilizers": "none"}, "stabilizers=[]"),
    ("st-ppo", {"importance_sampling_level": "sequence"}, "importance_sampling_level='seq"),
])  # fmt: skip
def test_a_field_that_contradicts_the_variant_raises_with_both(variant, options, named):
    with pytest.raises(ValueError, match=f"`{re.escape(named)}.*contradicts `variant='{variant}'`"):
        config(variant=variant, **options)


@pytest.mark.parametrize(("kind", "level", "variant", "stabilizers"), [
    (STPPOConfig, "token", "s-ppo", DEFAULT),
    (STPPOConfig, "turn", "st-ppo", DEFAULT),
    (STPPOConfig, "sequence", None, []),
    (STGRPOConfig, "token", "grpo", []),
    (STGRPOConfig, "sequence", "gspo", []),
    (STGRPOConfig, "turn", "st-grpo", DEFAULT),
])  # fmt: skip
@pytest.mark.parametrize("typed", [True, False])
def test_a_level_alone_chooses_the_variant(kind, level, variant, stabilizers, typed):
    """From the command line too, where the parser hands the default of `variant` on."""
    if typed:
        words = f"--output_dir out --use_cpu --bf16 false --importance_sampling_level {level}"
        (args,) = TrlParser((kind,)).parse_args_and_config(words.split())
    else:
        args = config(kind, importance_sampling_level=level)
    found = args.variant, args.importance_sampling_level, args.stabilizers
    assert found == (variant, level, stabilizers)
    assert type(args.variant) in (str, type(None))


@pytest.mark.parametrize(("kind", "level", "stabilizers", "variant"), [
    (STPPOConfig, "token", [], "ppo"),
    (STPPOConfig, "turn", [], "turn-ppo"),
    (STPPOConfig, "token", ["winners"], "s-ppo"),
    (STPPOConfig, "sequence", ["share"], None),
    (STGRPOConfig, "token", ["share"], "s-grpo"),
    (STGRPOConfig, "turn", [], "turn-grpo"),
])  # fmt: skip
def test_a_level_and_stabilizers_choose_it_together(kind, level, stabilizers, variant):
    args = config(kind, importance_sampling_level=level, stabilizers=stabilizers)
    found = args.variant, args.importance_sampling_level, args.stabilizers
    assert found == (variant, level, stabilizers)


def test_a_variant_that_is_typed_stands_even_if_it_is_the_default():
    words = "--output_dir out --use_cpu --bf16 false --variant st-ppo --importance_sampling_level"
    with pytest.raises(ValueError, match="`importance_sampling_level='token'` contradicts"):
        TrlParser((STPPOConfig,)).parse_args_and_config([*words.split(), "token"])


def test_without_a_variant_the_two_fields_are_free():
    plain = config(variant=None)
    assert (plain.importance_sampling_level, plain.stabilizers) == ("turn", [])
    free = config(variant=None, importance_sampling_level="sequence", stabilizers=["winners"])
    assert (free.importance_sampling_level, free.stabilizers) == ("sequence", ["winners"])


@pytest.mark.parametrize(("stabilizers", "scale", "weighs", "second"), [
    (["winners", "share"], "share", True, False),
    (["winners"], None, True, False),
    ("share", "share", False, True),
    (["triggered", "winners"], "triggered", True, True),
])  # fmt: skip
def test_what_the_list_means(stabilizers, scale, weighs, second):
    args = config(stabilizers=stabilizers)
    kind = args.scaling_stabilizer
    found = kind and kind.name, args.weighs_episodes, args.takes_second_gradient
    assert found == (scale, weighs, second)
    assert args.measures_clip_bias is (scale is not None)


def test_a_list_is_read_from_the_command_line():
    words = "--output_dir out --use_cpu --bf16 false --stabilizers winners share"
    (args,) = TrlParser((STPPOConfig,)).parse_args_and_config(words.split())
    assert args.stabilizers == ["winners", "share"]
    assert config(stabilizers=["share", "share"]).stabilizers == ["share"]


ACCEPTED = (
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "sgd", "adafactor",
)  # fmt: skip
REFUSED = (
    *("lomo", "adalomo", "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
    *("galore_adamw", "galore_adafactor", "galore_adafactor_layerwise"),
    *("apollo_adamw", "apollo_adamw_layerwise"),
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_optimizers_whose_step_is_proportional_to_the_rate_can_be_scaled(name):
    assert config(optim=name).scales_step


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_whose_step_is_not_are_refused_for_share_only(name):
    if "lomo" in name or "layerwise" in name:
        for options in ({}, {"stabilizers": "winners"}, {"variant": "turn-ppo"}):
            with pytest.raises(ValueError, match=f"`optim='{name}'`"):
                config(optim=name, **options)
        return
    with pytest.raises(ValueError, match=f"`optim`: '{name}' is not supported by `stab"):
        config(optim=name)
    assert config(optim=name, stabilizers=["winners"]).optim == name
    assert config(optim=name, variant="turn-ppo").optim == name


def test_each_optimizer_of_transformers_has_been_decided_on():
    """A new family must be put into one of the two lists of `stabilizers/base.py` after a look at it."""
    known = (*ACCEPTED, *REFUSED)
    families = ("adamw", "rmsprop", "lion", "ademamix", "adagrad")
    undecided = {
        o.value
        for o in OptimizerNames
        if o not in known and not any(f in o.value for f in families)
    }
    assert undecided == set()
