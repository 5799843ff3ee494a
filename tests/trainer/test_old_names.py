"""Names of TRL's former PPOTrainer: arguments are refused with the new name."""

from __future__ import annotations

import pytest

from trl_stppo import PPOConfig, PPOTrainer, STGRPOTrainer


@pytest.mark.parametrize("kind", [PPOTrainer, STGRPOTrainer])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("config", "args"),
        ("policy", "model"),
        ("ref_policy", "ref_model"),
        ("tokenizer", "processing_class"),
        ("dataset", "train_dataset"),
    ],
)
def test_arguments_of_old_name_the_new_ones(kind, old, new):
    with pytest.raises(TypeError, match=rf"^{kind.__name__} .*`{old}` \(TRL's .*\) is `{new}`"):
        kind(model=None, **{old: None})


def test_all_of_them_are_named_at_once(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=r"`config` .* is `args`; `policy` .* is `model`; `ref_pol"):
        PPOTrainer(config=config, policy=None, ref_policy=None)


def test_a_trainer_needs_a_policy():
    with pytest.raises(TypeError, match="PPOTrainer needs a `model`"):
        PPOTrainer()


def test_a_misspelt_argument_is_asked_about():
    with pytest.raises(TypeError, match=r"`reward_func` is none .*Did you mean `reward_funcs`"):
        PPOTrainer(model=None, reward_func=None)
