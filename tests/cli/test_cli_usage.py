"""Wrong words: exit code 2, the closest right ones, and no traceback."""

import pytest
import transformers
from packaging.version import Version

from tests.script_kit import DEMO
from trl_stppo.cli.main import main
from trl_stppo.wording import GONE, RENAMED

RUN = "--model_name_or_path a --dataset_name b --reward_funcs c:d"
SEARCH = "--environment trl_stppo.recipes.search:SearchEnv"


def said(capsys, *words: str) -> str:
    """What a command line with a mistake prints."""
    assert main(list(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "trian",
            "`COMMAND`: invalid choice: 'trian' (choose from",
        ),
        ("trian", "Did you mean `train` or `trace`?"),
        ("env chek", "Did you mean `env check`?"),
        ("frobnicate", "`COMMAND`: invalid choice: 'frobnicate' (choose from"),
        ("--versoin", "unrecognized arguments: --versoin"),
        ("train --max_turn 3", "`--max_turn`: not known here. Did you mean `--max_turns` or"),
        ("train --max-turn=3", "`--max-turn=3`: not known here. Did you mean `--max_turns` or"),
        ("train --learning 1", "`--learning`: not known here."),  # no abbreviation
        ("train --modls a b", "`--modls`: not known here."),
        ("train --optim adamw_troch", "`--optim`: invalid choice: 'adamw_troch' (choose from"),
        ("train --optim adamw_troch", "Did you mean `adamw_torch`"),
        ("evaluate --dry_run", "`--dry_run`: not known here."),
        ("train --qlora", "It is called `--load_in_4bit` here."),
        ("train --model x", "It is called `--model_name_or_path` here."),
        ("train --init_kl_coef 1", "Did you mean `--kl_coef`?"),
        ("train --lr 1", "It is called `--learning_rate` here."),
        (
            "train --mini_batch_size 8",
            "There is none here: it follows from per_device_train_batch_size",
        ),
        (
            "train run.yaml",
            "`run.yaml` belongs to no flag. Name a file of settings by `--config run.yaml`.",
        ),
        (f"train {RUN} --multi_gpu run.yaml", "`run.yaml` belongs to no flag."),
        ("train --max_turns x", "`--max_turns`: invalid int value: 'x'."),
        ("train --variant so-ppo", "`variant='so-ppo'`: allowed are 'ppo'"),
        ("train --config", "`--config` needs the path of a YAML file"),
        ("train --config nowhere.yaml", "`--config nowhere.yaml` cannot be read: No such file"),
        ("train --config a --config b", "`--config` is given twice"),
        (
            f"train {RUN} --scale_rewards batch --use_cpu --bf16 false",
            "`scale_rewards='batch'` is not supported",
        ),
        (
            f"train {RUN} --accelerate_config zero4",
            "accelerate launch: `--accelerate_config`: `zero4` is no file, and no name of one. Did you",
        ),
        (f"train {RUN} --mixed_precision bf61", "Did you mean `bf16`"),
        (
            f"train {RUN} --num_processes two",
            "accelerate launch: `--num_processes`: invalid int value: 'two'.",
        ),
        (
            f"evaluate --max_rows 0 --use_cpu --bf16 false --model_name_or_path a {SEARCH}",
            "`max_rows=0`: must satisfy",
        ),
        ("env play --learning_rate 1", "`--learning_rate`: not known here."),
        (f"env play {SEARCH} --row [1]", "`row=[1]` is no JSON object"),
        ("env play --environment nowhere:Env", "`nowhere:Env`: there is no module nowhere"),
        ("env check", "the following arguments are required: MODULE:CLASS"),
        ("env check a:b --row {}", "there is no module a"),
        ("env check trl_stppo.recipes.search:SearchEn", "Did you mean `SearchEnv`"),
        ("env check trl_stppo.recipes.search:SearchEnv --stict", "Did you mean `--strict`"),
        ("show", "`--model_name_or_path` is missing"),
        ("estimate", "`--model` is missing"),
        ("estimate --model x --card big", "`--card big`: write its memory in GB"),
        ("estimate --model x --qlora 4", "`--qlora`: Truthy value expected: got 4"),
    ],
)
def test_what_to_write_instead_is_said(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = said(capsys, *words.split())
    assert message in shown
    assert shown.splitlines()[-1].endswith("--help explains the flags.")


def test_all_mistakes_are_said_at_once(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "max_turn: 3\nvariant: ppo\nmax_tokens: 4\nnum_processes: 2\n"
    )
    shown = said(capsys, *f"train --config {tmp_path}/run.yaml --use_cpu --learnin_rate 3".split())
    assert "`--learnin_rate`: not known here. Did you mean `--learning_rate`" in shown
    shown = said(capsys, *f"train --config={tmp_path}/run.yaml --use_cpu".split())
    assert f"`max_turn` in {tmp_path}/run.yaml: not known here. Did you mean `max_turns`" in shown
    assert f"`max_tokens` in {tmp_path}/run.yaml: not known here." in shown
    assert "num_processes" not in shown, "the launcher's"


@pytest.mark.parametrize("command", ["train", "evaluate", "show", "env play"])
def test_one_file_serves_all_commands_and_none_takes_a_slip(command, capsys, tmp_path):
    path, names = tmp_path / "run.yaml", ("dry_run", "models", "num_processes", "learning_rate")
    path.write_text("\n".join([*(f"{name}: 1" for name in names), "learnin_rate: 1", "config: x"]))
    shown = said(capsys, *command.split(), "--config", str(path))
    assert f"`learnin_rate` in {path}: not known here." in shown
    assert f"`config` in {path}: not known here." in shown
    assert not any(f"`{name}` in" in shown for name in names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_turns: three", "`--max_turns`: invalid int value: 'three'."),
        ("- max_turns", "holds no settings"),
        ("max_turns: [", "is no YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(text, message, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    shown = said(capsys, "train", "--config", str(path))
    assert message in shown
    assert str(path) in shown


def test_todays_names_exist_and_former_ones_do_not():
    from trl_stppo.cli.flag_types import types_of
    from trl_stppo.cli.flags import FlagParser
    from trl_stppo.cli.usage import names_of

    train, compare, look = (
        names_of(FlagParser(types_of(command))) for command in ("train", "evaluate", "show")
    )
    known = train | compare | look
    assert set(RENAMED.values()) <= train
    # transformers 5.13 has these two still.
    old = Version(transformers.__version__) < Version("5.23")
    assert (set(RENAMED) | set(GONE)) & known <= ({"logging_dir", "warmup_ratio"} if old else set())


def test_aliases_of_the_former_trainer_are_taken(capsys):
    """These names have stayed."""
    words = "--response_length 200 --total_episodes 512 --num_ppo_epochs 1 --dry_run"
    assert main(["train", "--config", DEMO, *words.split(), "--max_completion_length", "200"]) == 0
    assert "200 tokens" in " ".join(capsys.readouterr().out.replace("│", " ").split())
