"""A resumed run has the reference policy that it began with, or is refused."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.kit.builders import build
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo import STPPOTrainer
from trl_stppo.errors import CheckpointError

RUN = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "learning_rate": 1e-2}
LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def numbered(completions, **kwargs):
    return [float(number) for number in range(len(completions))]


def policy():
    return tiny_policy(char_tokenizer())


def run(folder, model, resume=None, arguments=None, **options):
    """Trains, and returns the trainer and the logged KLs to the reference."""
    arguments = {"model": model, "reward_funcs": numbered, **(arguments or {})}
    trainer = build(folder, STPPOTrainer, arguments=arguments, **{**RUN, **options})
    trainer.train(resume and str(resume))
    return trainer, [e["objective/kl"] for e in trainer.state.log_history if "objective/kl" in e]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a full run, begun with a policy on disk; its checkpoint is of step 2."""
    folder = tmp_path_factory.mktemp("full")
    policy().save_pretrained(folder / "base")
    run(folder / "run", str(folder / "base"))
    return folder


def begun(saved):
    return saved / "run" / "checkpoint-2"


FORMS = {
    "name": str,
    "instance": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_checkpoint_as_model_is_refused(form, saved, tmp_path):
    with pytest.raises(CheckpointError, match="`model`"):
        run(tmp_path, FORMS[form](begun(saved)), begun(saved))


@pytest.mark.parametrize("form", FORMS)
def test_the_first_model_goes_on(form, saved, tmp_path):
    whole = run(tmp_path / "whole", FORMS[form](saved / "base"))[1]
    trainer, kls = run(tmp_path / "resumed", FORMS[form](saved / "base"), begun(saved))
    assert trainer.state.global_step == 4
    assert kls == whole


def test_a_reference_of_its_own_counts(saved, tmp_path):
    run(tmp_path / "fits", str(begun(saved)), begun(saved), {"ref_model": policy()})
    for other in (FORMS["instance"](begun(saved)), policy().bfloat16()):
        with pytest.raises(CheckpointError, match="reference"):
            run(tmp_path / "other", str(begun(saved)), begun(saved), {"ref_model": other})


@pytest.mark.parametrize("options", [{"kl_coef": 0.0, "beta": 0.1}, {"kl_coef": 0.0}])
def test_only_a_kl_needs_the_reference(options, tmp_path):
    run(tmp_path / "run", policy(), **options)
    folder = tmp_path / "run" / "checkpoint-2"
    resumed = FORMS["instance"](folder)
    if "beta" in options:
        with pytest.raises(CheckpointError, match="reference"):
            run(tmp_path / "resumed", resumed, folder, **options)
    else:
        run(tmp_path / "resumed", resumed, folder, **options)


@pytest.mark.long
def test_the_base_of_an_adapter_is_the_reference(tmp_path):
    policy().save_pretrained(tmp_path / "base")
    char_tokenizer().save_pretrained(tmp_path / "base")
    base, lora = str(tmp_path / "base"), {"peft_config": LORA}
    run(tmp_path / "run", base, arguments=lora)
    folder = tmp_path / "run" / "checkpoint-2"
    run(tmp_path / "same", base, folder, lora)
    with pytest.raises(CheckpointError, match="reference"):
        run(tmp_path / "adapter", str(folder), folder)
    other = policy()
    torch.nn.init.normal_(other.lm_head.weight)
    with pytest.raises(CheckpointError, match="lm_head"):
        run(tmp_path / "other", other, folder, lora)


def test_a_copied_adapter_comes_from_the_checkpoint(tmp_path):
    """So the checkpoint may be the model."""
    (tmp_path / "base").mkdir()
    policy().save_pretrained(tmp_path / "base")
    char_tokenizer().save_pretrained(tmp_path / "base")
    random = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    whole = run(tmp_path / "run", str(tmp_path / "base"), arguments={"peft_config": random})[1]
    folder = tmp_path / "run" / "checkpoint-2"
    assert run(tmp_path / "resumed", str(folder), folder)[1] == whole


def test_a_moving_reference_comes_from_the_checkpoint(saved, tmp_path):
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    whole = run(tmp_path / "run", str(saved / "base"), **moving)[1]
    folder = tmp_path / "run" / "checkpoint-2"
    assert run(tmp_path / "resumed", str(folder), folder, **moving)[1] == whole
    with pytest.raises(CheckpointError, match="sync_ref_model"):
        run(tmp_path / "fixed", str(folder), folder)
