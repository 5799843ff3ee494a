"""`variant` and the two fields it stands for; which corrections fit which optimizer."""

import pytest
from transformers.training_args import OptimizerNames
from trl import TrlParser

from trl_stppo import STGRPOConfig, STPPOConfig

DEFAULT = ["trust_region", "share"]


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
    assert not args.takes_second_gradient
    repeated = config(variant=variant, importance_sampling_level=level, stabilizers=stabilizers or "none")
    assert (repeated.importance_sampling_level, repeated.stabilizers) == (level, stabilizers)


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


def test_a_variant_that_is_typed_stands_even_if_it_is_the_default():
    words = "--output_dir out --use_cpu --bf16 false --variant st-ppo --importance_sampling_level"
    with pytest.raises(ValueError, match="`importance_sampling_level='token'` contradicts"):
        TrlParser((STPPOConfig,)).parse_args_and_config([*words.split(), "token"])


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
        with pytest.raises(ValueError, match=f"`optim='{name}'`"):
            config(optim=name, stabilizers=["winners"])
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
        o.value for o in OptimizerNames if o not in known and not any(f in o.value for f in families)
    }
    assert undecided == set()
