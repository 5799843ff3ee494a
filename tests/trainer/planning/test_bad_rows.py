"""Rows that cannot be played: found before the training, or at the cost of their episode alone."""

import re

import pytest
from datasets import Dataset

from tests.kit.builders import LIMITS, TEXT, Kept, build, prompts
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from trl_stppo.errors import EnvironmentFailureError
from trl_stppo.trainer.planning.data import check_eval_dataset, unpadded
from trl_stppo.trainer.planning.plan import RolloutPlan

USER = {"role": "user", "content": "say a "}
ANSWER = {"role": "assistant", "content": "b"}
# Refuses two messages of a user in a row, as many templates do.
STRICT = (
    "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role[0] }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a {% endif %}"
)
TWO = {"environment_factory": {"one": CountEnv, "two": CountEnv}}


class ToolEnv:
    def reset(self, **row):
        return ""

    def look(self, word: str) -> str:
        """Look a word up.\n\nArgs:\n    word: the word."""
        return word

    def get_reward(self):
        return 1.0


def rows(bad=None, count=12, at=7, **columns):
    """Rows of which one is bad."""
    good = {"prompt": [USER], **columns}
    return [{**good, **bad} if bad and i == at else dict(good) for i in range(count)]


def strict():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = STRICT
    return tokenizer


@pytest.mark.parametrize(("bad", "arguments", "named"), [
    ({"prompt": [{**USER, "content": None}]}, {}, "prompt"),
    ({"prompt": [{**USER, "role": None}]}, {}, "prompt.*role"),
    ({"prompt": []}, {}, "prompt"),
    ({"prompt": None}, {}, "prompt"),
    ({"prompt": [USER, ANSWER]}, {}, "prompt.*assistant"),
    ({"environment": "One"}, TWO, "environment.*'One'.*'two'"),
    ({"environment": None}, TWO, "environment.*None"),
    ({"prompt": []}, TEXT, "prompt"),
])  # fmt: skip
@pytest.mark.parametrize("role", ["train_dataset", "eval_dataset"])
def test_each_row_is_looked_at_and_named(bad, arguments, named, role, tmp_path):
    good = {"environment": "one"} if arguments is TWO else {}
    given = {**arguments, "train_dataset": Dataset.from_list(rows(**good))}
    given[role] = Dataset.from_list(rows(bad, **good))
    with pytest.raises(ValueError, match=rf"row 7 of `{role}`") as caught:
        build(tmp_path, arguments=given, **(LIMITS if arguments else {}))
    assert re.search(named, str(caught.value))


def test_a_text_prompt_of_a_tool_environment_is_found():
    data = Dataset.from_dict({"prompt": ["go"] * 3, "environment": ["text", "text", "tool"]})
    probes = {"text": CountEnv(), "tool": ToolEnv()}
    plan = RolloutPlan({"text": CountEnv}, {"tool": ToolEnv}, probes)
    check_eval_dataset(data.select([0, 1]), plan)
    with pytest.raises(ValueError, match="row 2 of `eval_dataset`"):
        check_eval_dataset(data, plan)


def no_column(completions, **kwargs):
    return [0.0] * len(completions)


def only_completions(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
    return [0.0] * len(completions)


async def agent(client, row):
    return 1.0


@pytest.mark.parametrize(("columns", "arguments", "refused"), [
    ({"number": [3] * 8}, TEXT, True),
    ({"number": [3] * 8}, {"agent": agent, "reward_funcs": None}, True),
    ({"number": [3] * 8}, {"reward_funcs": no_column}, True),
    ({"number": [3] * 8}, {"reward_funcs": only_completions, "turn_reward_funcs": no_column}, True),
    ({"environment": ["one"] * 8}, TWO, True),
    ({}, TEXT, False),
    ({}, {"reward_funcs": no_column}, False),
])  # fmt: skip
def test_columns_that_somebody_takes_may_not_be_removed(columns, arguments, refused, tmp_path):
    options = LIMITS if arguments in (TEXT, TWO) else {}
    given = {**arguments, "train_dataset": prompts(8, **columns)}
    if not refused:
        build(tmp_path, arguments=given, remove_unused_columns=True, **options)
        return
    for data in (given["train_dataset"], given["train_dataset"].to_iterable_dataset()):
        with pytest.raises(ValueError, match=f"`remove_unused_columns=True`.*`{next(iter(columns))}`"):
            build(
                tmp_path,
                arguments={**given, "train_dataset": data},
                remove_unused_columns=True,
                **options,
            )


def with_token(template: bool = False):
    """A tokenizer with a special token for which the model has no row."""
    tokenizer, model = char_tokenizer(), tiny_policy(char_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<obs>"]})
    if template:
        tokenizer.chat_template = "<obs>" + tokenizer.chat_template
    return {"processing_class": tokenizer, "model": model}


def test_a_token_without_a_row_is_named_if_the_template_writes_it(tmp_path):
    build(tmp_path, arguments=with_token())
    with pytest.raises(ValueError, match="'<obs>'"):
        build(tmp_path, arguments=with_token(template=True))


def test_ids_that_begin_with_the_begin_of_text_keep_it():
    tokenizer = char_tokenizer()
    row = {"input_ids": [0, 0, 5, 6]}
    assert unpadded(row, tokenizer) == [5, 6]
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token
    assert unpadded(row, tokenizer) == [0, 0, 5, 6]
    assert unpadded({**row, "attention_mask": [0, 1, 1, 1]}, tokenizer) == [0, 5, 6]


def played(tmp_path, data, **options):
    """A training whose first rollout has rows 0 to 7, its second rows 8 to 15."""
    arguments = {"processing_class": strict(), **options.pop("arguments", {})}
    settings = {"shuffle_dataset": False, "num_mini_batches": 1, "max_steps": 2, **options}
    trainer = build(
        tmp_path,
        Kept,
        arguments={**arguments, "train_dataset": Dataset.from_list(data)},
        **settings,
    )
    trainer.train()
    return trainer


LONG = {"prompt": [{**USER, "content": "x" * 600}]}
TWICE = {"prompt": [USER, USER]}


@pytest.mark.parametrize(("bad", "arguments"), [(LONG, {}), (TWICE, TEXT)], ids=["long", "refused"])
def test_what_only_rendering_shows_costs_the_episode_and_names_the_row(bad, arguments, tmp_path, caplog):
    limits = LIMITS if arguments else {}
    trainer = played(tmp_path, rows(bad, 16, at=11), arguments=arguments, **limits)
    assert trainer.state.global_step == 2
    for rollout, failed in zip(trainer.rollouts, ([], [3]), strict=True):
        reasons = [str(episode.stop_reason) for episode in rollout.episodes]
        assert [i for i, reason in enumerate(reasons) if reason == "env_error"] == failed
        assert [i for i, e in enumerate(rollout.episodes) if not e.trains] == failed
    _, batch, *_ = trainer.kept[1]
    assert batch["loss_mask"].any(dim=1).tolist() == [i != 3 for i in range(8)]
    assert batch["prompt_ids"].shape[1] < 100
    assert caplog.text.count("row 11 of `train_dataset`") == 1


@pytest.mark.parametrize("arguments", [{}, TEXT], ids=["plain", "environment"])
def test_a_first_rollout_of_bad_rows_alone_ends_the_run(arguments, tmp_path):
    with pytest.raises(EnvironmentFailureError, match="must alternate") as caught:
        played(tmp_path, [TWICE] * 16, arguments=arguments, **(LIMITS if arguments else {}))
    assert "8 of 8" in str(caught.value)
    assert "row 0 of `train_dataset`" in str(caught.value)
