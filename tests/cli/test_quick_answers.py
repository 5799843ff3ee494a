"""Wrong words are answered in under a second: fields are read from their modules' text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from tests.script_kit import DEMO, ROOT
from trl_stppo.cli import sources
from trl_stppo.cli.arguments import TRAINERS
from trl_stppo.cli.flag_types import config_of, types_of
from trl_stppo.cli.flags import FlagParser
from trl_stppo.cli.launch import launch_flags, launch_parser
from trl_stppo.cli.main import main
from trl_stppo.cli.usage import names_of

# What its module's text does not say in one place; no answer to a wrong word depends on it.
OTHER_DEFAULTS = {"optim"}


def told(parser: FlagParser) -> dict[str, tuple[object, ...]]:
    """All that a parser knows of each flag, but for its default."""
    return {
        option: (
            *(action.dest, action.nargs, action.const, action.required, action.help),
            *(list(action.choices or []), getattr(action.type, "__name__", action.type)),
        )
        for option, action in parser._option_string_actions.items()
    }


@pytest.mark.parametrize("command", TRAINERS)
@pytest.mark.parametrize("variant", ["st-ppo", "gspo"])
def test_text_and_import_make_the_same_parser(command, variant):
    words = ["--variant", variant]
    text, imported = (FlagParser(types_of(command, words, whole=whole)) for whole in (False, True))
    assert told(text) == told(imported)
    differing = {
        action.dest
        for action, other in zip(text._actions, imported._actions, strict=True)
        if str(action.default) != str(other.default)
    }
    assert differing <= OTHER_DEFAULTS
    kinds = [config_of(variant, whole=whole) for whole in (False, True)]
    assert [f.name for f in fields(kinds[0])] == [f.name for f in fields(kinds[1])]


def test_the_launchers_flags_are_those_of_its_parser():
    assert launch_flags() == names_of(launch_parser()) - {"help"}


def test_text_that_is_written_otherwise_is_imported_instead(monkeypatch):
    from trl_stppo import STPPOConfig

    monkeypatch.setattr(sources, "source", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert config_of("st-ppo", whole=False) is STPPOConfig


@pytest.mark.parametrize("lost", ["lost.Kind", "int = lost.make()"])
def test_a_field_that_cannot_be_told_is_not_passed_over(lost, tmp_path, monkeypatch):
    """Its flag would be refused."""
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "__init__.py").touch()
    text = f"from dataclasses import dataclass\nfrom . import lost\n@dataclass\nclass A:\n    odd: {lost}\n"
    (tmp_path / "strange" / "args.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NameError, match="lost"):
        _ = sources.Source("strange.args").A


QUICK = """
import sys
from trl_stppo.cli import main
code = main(sys.argv[1:])
print(*({"torch", "transformers", "datasets", "accelerate"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        ("train --max_turn 3", "", "`--max_turn`: not known here. Did you mean `--max_turns`"),
        (
            "evaluate --modles a",
            "",
            "`--modles`: not known here. Did you mean `--module`, `--models`",
        ),
        ("estimate --modle a", "", "`--modle`: not known here. Did you mean `--module`, `--model`"),
        ("doctor --onyl full", "", "`--onyl`: not known here. Did you mean `--only`"),
        ("train --num_process 2", "", "Did you mean `--num_processes`"),
        ("train --max_turns x", "", "`--max_turns`: invalid int value: 'x'."),
        ("train --optim adamw_troch", "", "Did you mean `adamw_torch`"),
        ("train --variant so-ppo", "", "`variant='so-ppo'`: allowed are 'ppo'"),
        ("train", "learnin_rate: 1", "`learnin_rate` in FILE: not known here. Did you mean"),
        ("train", "max_turns: three", "In FILE: `--max_turns`: invalid int value: 'three'."),
        ("train", "eval_strategy: step", "In FILE: `--eval_strategy`: invalid choice: 'step'"),
        ("train", "variant: so-ppo", "`variant='so-ppo'`: allowed are 'ppo'"),
        ("train", "reward_funcs: [a_reward]", "`reward_funcs`: `a_reward`"),
        ("train", "", "`--model_name_or_path` is missing. Name a checkpoint"),
        ("train --model_name_or_path x", "", "`dataset_name` is not set, and environment=None"),
        (
            "train --model_name_or_path x --dataset_name y",
            "",
            "Nothing pays a reward: there is neither",
        ),
        ("train", "datasets: [{pth: x}]", "`datasets`: "),
        ("show", "learnin_rate: 1", "`learnin_rate` in FILE: not known here."),
    ],
)
def test_wrong_words_are_answered_without_a_heavy_import(words, text, message, tmp_path):
    """Which is what takes seconds."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    words = [*words.split(), *(["--config", str(path)] if text else [])]
    code = [sys.executable, "-c", QUICK, *words]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (2, ""), done.stdout + done.stderr
    assert message.replace("FILE", str(path)) in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_quick_look_reads_is_not_warned_of_twice(capsys, caplog):
    words = ["train", "--config", DEMO, "--dry_run", "--dataset_num_proc", "2"]
    assert main(words) == 0
    assert caplog.text.count("`--dataset_num_proc` is ignored") == 1
