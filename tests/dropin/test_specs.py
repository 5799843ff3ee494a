"""TRL's specs of Harbor and OpenReward plug into our trainers as into GRPOTrainer.

What is TRL's runs as it is: the specs, the environments, how tools are bound and rewards are read.
Stood in for is what it imports of `harbor` and `openreward`, by the names and forms that it asks for.
"""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from trl.experimental.harbor import HarborSpec

from tests.kit.builders import logs
from tests.kit.tool_model import call
from tests.trainer.loop.test_tool_environments import said_by, tool_trainer
from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOTrainer

TRAINERS = [
    (STPPOTrainer, {}),
    (STGRPOTrainer, {"variant": "rebn", "num_generations": 1, "kl_coef": STGRPOConfig.kl_coef}),
]


def modules(monkeypatch, **contents):
    """Modules by dotted name (`a__b` is `a.b`), and the packages above them."""
    for name, names in contents.items():
        parts = name.split("__")
        for depth in range(1, len(parts) + 1):
            dotted = ".".join(parts[:depth])
            if dotted not in sys.modules:
                monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
        vars(sys.modules[".".join(parts)]).update(names)


def trained(kind, options, folder, monkeypatch, spec, turns):
    """Train on a spec while a script says `turns(number)`, the number being that of the instruction."""
    given = {"train_dataset": spec.train_dataset, "reward_funcs": spec.reward_funcs}
    options = {"max_completion_length": 900, "max_steps": 2, **options}
    turn, environment = said_by(turns, r"task (\d)"), spec.environment_factory
    trainer = tool_trainer(folder, monkeypatch, environment, given, kind=kind, turn=turn, **options)
    trainer.train()
    return trainer


class Sandbox:
    """One shell command at a time; knows `echo -n "x" > /workdir/answer.txt`."""

    os, started = "linux", 0

    def __init__(self):
        self.answer = None

    async def start(self, force_build):
        type(self).started += 1

    async def stop(self, delete):
        pass

    async def run_healthcheck(self):
        pass

    async def empty_dirs(self, folders, chmod):
        pass

    async def exec(self, command, timeout_sec=None, user=None):
        if written := re.fullmatch(r'echo -n "(\w+)" > /workdir/answer.txt', command):
            self.answer = written.group(1)
        return SimpleNamespace(stdout=f"ran {command}", stderr="", return_code=0)


class Verifier:
    def __init__(self, config, task, trial_paths, environment, override_env):
        self.right = environment.answer == task.right

    async def verify(self):
        return SimpleNamespace(rewards={"reward": float(self.right)})


def task_of(task_dir):
    """As `harbor.models.task.task.Task` reads a folder."""
    return SimpleNamespace(
        instruction=(task_dir / "instruction.md").read_text(),
        right=(task_dir / "right.txt").read_text(),
        short_name=task_dir.name,
        paths=SimpleNamespace(environment_dir=task_dir / "environment"),
        config=SimpleNamespace(environment=None, verifier=SimpleNamespace(env={})),
    )


@pytest.fixture
def harbor(monkeypatch, tmp_path):
    """The package, and a folder of four tasks."""
    monkeypatch.setattr(Sandbox, "started", 0)
    plain = SimpleNamespace
    modules(
        monkeypatch,
        harbor__environments__factory={
            "EnvironmentFactory": plain(create_environment_from_config=lambda **given: Sandbox())
        },
        harbor__models__task__task={"Task": task_of},
        harbor__models__trial__config={"EnvironmentConfig": plain, "VerifierConfig": plain},
        harbor__models__trial__paths={
            "TrialPaths": plain,
            "EnvironmentPaths": plain(for_os=lambda os: plain(verifier_dir="/verifier")),
        },
        harbor__verifier__factory={"VerifierFactory": plain(create_verifier_from_config=Verifier)},
    )
    for number in range(4):
        folder = tmp_path / "tasks" / f"t{number}"
        (folder / "environment").mkdir(parents=True)
        (folder / "instruction.md").write_text(f"This is task {number}.")
        (folder / "right.txt").write_text(str(number))
        (folder / "task.toml").write_text(f'[metadata]\ngold_answer = "{number}"\n')
    return tmp_path


@pytest.mark.parametrize(("kind", "options"), TRAINERS, ids=lambda v: getattr(v, "_name", ""))
def test_a_spec_of_harbor_trains_and_its_verifier_pays(kind, options, harbor, monkeypatch):
    def turns(number):
        answer = "none" if number == 3 else str(number)
        return [
            call("bash", command="ls"),
            call("bash", command=f'echo -n "{answer}" > /workdir/answer.txt'),
            "done",
        ]

    spec = HarborSpec(str(harbor))
    trainer = trained(kind, options, harbor / "out", monkeypatch, spec, turns)
    figures = logs(trainer)
    assert figures["episode/score"] == 0.75
    assert figures["turns/mean"] == 3.0
    assert figures["tools/call_frequency"] == 2.0
    assert figures["tools/failure_frequency"] == 0.0
    assert figures["reward_std"] == pytest.approx(0.5)
    assert Sandbox.started in (4, 8)
