"""`trl-stppo evaluate`: figures per data set, averages, several agents, nothing but weights loaded."""

import asyncio
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.kit.launch import launcher
from tests.kit.script_kit import AGENT, ROOT, small_data
from tests.kit.tiers import quick
from trl_stppo.cli import agents, evaluate, train
from trl_stppo.cli import evaluation_tables as tables
from trl_stppo.cli.flags import EvaluateArguments, TrainArguments
from trl_stppo.hub.settings import AgentSettings

NAMES = ["nq", "nq", "hotpotqa"] * 4
FLAGS = [
    *("--use_cpu", "true", "--bf16", "false", "--max_turns", "4", "--max_turn_tokens", "24"),
    *("--max_completion_length", "160", "--per_device_eval_batch_size", "16"),
    *("--eval_generation_kwargs", '{"temperature": 0.0}', "--report_to", "none"),
    *("--environment", "scripts.search.search_env:StdlibSearchEnv"),
    *("--environment_kwargs", '{"invalid_reward": -0.1}'),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data") / "search", test=NAMES)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of an adapter on the shipped agent that has learned something else."""
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(AGENT)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    torch.manual_seed(0)
    changed = {name: value + 0.3 * torch.randn_like(value) for name, value in weights.items()}
    save_file(changed, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def words(data, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("output"))
    return [*FLAGS, "--dataset_name", data, "--output_dir", folder, "--model_name_or_path", AGENT]


@pytest.fixture(scope="module")
def evaluated(words, adapter, tmp_path_factory):
    """Results of two agents, and the files that were written."""
    output = tmp_path_factory.mktemp("tables") / "deep" / "table.json"
    flags = ["--models", AGENT, adapter, "--output", str(output)]
    return evaluate.compare([*words, *flags]), output


@pytest.mark.long
def test_each_data_set_has_its_own_figures_and_all_have_a_mean(evaluated):
    shipped, changed = evaluated[0].values()
    assert changed["nq"]["turns"] != shipped["nq"]["turns"], "the adapter plays"
    assert list(shipped) == ["nq", "hotpotqa", "mean of data sets"]
    assert [figures["episodes"] for figures in shipped.values()] == [8, 4, 12]
    different = set()
    for name in ("success", "turns"):
        nq, hotpot, mean = (figures[name] for figures in shipped.values())
        assert mean == pytest.approx((nq + hotpot) / 2)
        different.add(nq != hotpot)
    assert any(different), "the case should be interesting"
    for figures in shipped.values():
        assert 0 <= figures["success low"] < figures["success"] < figures["success high"] <= 1
        assert 1 <= figures["turns"] <= 4
        assert 0 <= figures["valid actions"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("case", quick(["drawn", "half", "answers"], "answers"))
def test_the_figures_are_those_of_a_trainer(case, words, monkeypatch):
    """Drawn tokens, rewards of functions, repetitions, penalties, batches that do not come out even."""
    sampling = {"temperature": 1.0, "max_completion_length": 160 if case == "half" else 70}
    flags = [*words, "--top_p", "0.9", "--eval_generation_kwargs", json.dumps(sampling)]
    flags += ["--num_generations_eval", "3"]
    flags += ["--per_device_eval_batch_size", "5", "--missing_eos_penalty", "0.4", "--seed", "3"]
    flags += ["--max_rows", "4", "--reward_weights", "0.3", "0"]
    flags += ["--reward_funcs", f"{__name__}:letters", f"{__name__}:shouts"]
    if case == "half":
        flags += ["--bf16", "true", "--max_rows", "8"]
        flags += ["--kl_coef", "0.0"]
    if case == "answers":
        flags += ["--environment", "none", "--max_turns", "null", "--max_turn_tokens", "null"]
    own = []
    monkeypatch.setattr(evaluate, "figures_of", lambda *said: own.append(said[0]) or tables.figures_of(*said))
    result = evaluate.compare(flags)
    args, config, model_args, trainer_class = agents.parse_flags(EvaluateArguments, flags)
    rows = evaluate.held_out_sets(args)["nq"]
    trainer = train.make_trainer(args_for_training(args), config, model_args, trainer_class)
    metrics = trainer.evaluate(rows)
    figures = next(iter(result.values()))["nq"]
    # The search environment reports F1, which counts in no score.
    assert ("F1" in figures) == (case in ("drawn", "half"))
    figures.pop("F1", None)
    assert figures == tables.figures_of(metrics, {"letters": "letters", "shouts": "shouts"}, "eval_")
    assert own[0]["completions/mean_length"] > 0
    shared = [name for name in own[0] if "f1_reward" not in name]
    for name in set(shared) - {"reward", "reward_std"}:
        assert own[0][name] == metrics[f"eval_{name}"], name
    assert figures["score low"] < figures["score"] < figures["score high"]
    assert figures["letters"] != figures["shouts"]


def args_for_training(args):
    """The same task, as `train` has it."""
    names = {spec.name for spec in dataclasses.fields(TrainArguments)}
    return TrainArguments(**{k: v for k, v in vars(args).items() if k in names})


def letters(prompts, completions, completion_ids, question, trainer_state, **columns):
    """What the agent has written, prompts and row included; None now and then."""
    text = [str(c) + str(p) + q for c, p, q in zip(completions, prompts, question, strict=True)]
    sizes = [len(t) + len(ids) for t, ids in zip(text, completion_ids, strict=True)]
    return [None if size % 5 == 0 else size / 1000 for size in sizes]


async def shouts(completions, **columns):
    await asyncio.sleep(0)
    return [str(c).count("e") / 10 for c in completions]


def test_rows_keep_their_order_where_all_of_them_fit():
    rows = Dataset.from_list([{"n": n} for n in range(9)])
    assert agents.drawn(rows, 9)["n"] == [*range(9)]
    few = agents.drawn(rows, 8)["n"]
    assert len(set(few)) == 8
    assert few != sorted(few)


@pytest.mark.parametrize(("flags", "said"), [
    (["--dataset_test_split", "dev"], "`dataset_test_split='dev'`"),
    (["--models", AGENT, "runs/nowhere"], "`models=runs/nowhere` is no file or folder"),
    (["--model_name_or_path", "runs/nowhere"], "`model_name_or_path=runs/nowhere` is no file"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_said(words, flags, said, monkeypatch):
    """Before anything is evaluated, so that nothing is lost."""
    monkeypatch.setattr(evaluate, "evaluate", None)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        evaluate.compare([*words, *flags])


def test_what_is_there_when_an_agent_fails_is_kept(words, monkeypatch, tmp_path, capsys):
    one = {"episodes": 4, "success": 0.5, "success low": 0.2, "success high": 0.8, "turns": 2.0}
    figures = tables.with_mean({"nq": one, "hotpotqa": one})

    def once(agent, folder, *rest):
        if folder != Path(AGENT):
            raise MemoryError("no room")
        return figures, []

    monkeypatch.setattr(evaluate, "evaluate", once)
    monkeypatch.setattr(evaluate, "policy_folder", lambda name, *rest, **options: Path(name))
    monkeypatch.setattr(evaluate, "load_agent", lambda *rest: None)
    flags = ["--models", AGENT, "second"]
    with pytest.raises(MemoryError):
        evaluate.compare([*words, *flags, "--output", str(tmp_path / "t.json")])
    assert json.loads((tmp_path / "t.json").read_text())["results"] == {"search-agent": figures}
    assert "hotpotqa" in capsys.readouterr().out


def test_the_first_episodes_are_shown(capsys):
    def episode(text):
        context = SimpleNamespace(prompt_ids=[text], ids=[], images=[])
        return SimpleNamespace(success=None, stop_reason="end", num_turns=1, contexts=[context])

    tokenizer = SimpleNamespace(decode=lambda ids, **options: "".join(ids))
    watch = evaluate.Watch(4, 0, SimpleNamespace(tokenizer=tokenizer, reader=None), "a")
    for batch in (["1", "2", "3"], ["4", "5", "6"], ["7"]):
        played = SimpleNamespace(episodes=[episode(f"row {text}") for text in batch])
        watch(played, SimpleNamespace(totals=[0.0] * len(batch)))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("row")]
    assert shown == ["row 1", "row 2", "row 3", "row 4"]
    assert len(watch.outcomes) == 7


def test_a_saved_agent_keeps_what_no_flag_sets(tmp_path):
    own = AgentSettings(max_completion_length=96, max_turns=3, max_turn_tokens=4)
    flags = ["--output_dir", "o", "--use_cpu", "true", "--bf16", "false", "--max_turns", "5"]
    # These are the defaults, and given all the same.
    flags += ["--top_p", "1.0", "--env_timeout_seconds", "120"]
    config = agents.parse_flags(EvaluateArguments, flags)[1]
    chosen = evaluate.chosen_settings(flags, config)
    without = evaluate.settings_for(tmp_path, config, chosen)
    sampling = {"temperature": 0.5, "top_p": 0.8}
    dataclasses.replace(own, sampling=sampling, env_timeout_seconds=7.0).save(tmp_path)
    kept = evaluate.settings_for(tmp_path, config, chosen)
    names = ("max_completion_length", "max_turns", "max_turn_tokens")
    assert [without[name] for name in names] == [512, 5, None]
    assert [kept[name] for name in names] == [96, 5, 4]
    assert without["sampling"]["temperature"] == 1.0
    assert kept["sampling"] == {"temperature": 0.5, "top_p": 1.0}
    assert kept["env_timeout_seconds"] == 120


def test_the_mean_by_hand():
    one = {"episodes": 100.0, "turns": 2.0}
    one |= {"success": 0.5, "success low": 0.4, "success high": 0.7}
    two = {"episodes": 50.0, "turns": 4.0, "F1": 0.3}
    two |= {"success": 0.2, "success low": 0.1, "success high": 0.3}
    both = tables.with_mean({"one": one, "two": two})
    mean = both["mean of data sets"]
    assert mean["success"] == pytest.approx(0.35)
    assert mean["success low"] == pytest.approx(0.35 - math.hypot(0.05, 0.05))
    assert mean["success high"] == pytest.approx(0.35 + math.hypot(0.1, 0.05))
    assert mean["turns"] == pytest.approx(3.0)
    assert "F1" not in mean, "it is not known of all of them"


@pytest.mark.slow
def test_two_processes_agree_with_one(words, evaluated, tmp_path):
    output = tmp_path / "two.json"
    result = subprocess.run(
        [sys.executable, *launcher(2), "scripts/evaluate.py", *words, "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(output.read_text())["results"]["search-agent"] == evaluated[0]["search-agent"]
    assert result.stdout.count("written:") == 1, "one process prints"


def test_a_table_of_80_columns_breaks_no_interval(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ends = {f"{column} {end}": 0.5 for column in ("success", "score") for end in ("low", "high")}
    parts = {"rows": dict.fromkeys(tables.MEASURES, 0.5) | ends}
    tables.print_table({"careless": parts, "checkpoint-100": parts})
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("0.500 [0.500, 0.500]") for line in lines) == 4
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_agents_are_compared_row_by_row(capsys):
    # Three rows, two episodes each: gains of 1, 2 and 0 episodes.
    wins = [1, 0, 1, 1, 0, 0]
    outcomes = {"base": [(False, 0.0)] * 6, "trained": [(bool(win), float(win)) for win in wins]}
    tables.print_differences(outcomes, 2)
    # Means of rows 0.5, 1, 0: mean 0.5, deviation 0.5, half width 1.96 * 0.5 / sqrt(3) = 0.566.
    said = "trained less base, all rows, paired: success +0.500 [-0.066, +1.066]\n"
    assert capsys.readouterr().out == said
    tables.print_differences({"a": [(None, 1.5)], "b": [(True, 1.0)]}, 1)
    assert capsys.readouterr().out == "b less a, all rows, paired: score -0.500\n"
