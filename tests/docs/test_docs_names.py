"""Options, functions and tests that the documentation names exist."""

import ast
import dataclasses
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from tests.kit.docs_kit import DOCS, PAGES, ROOT, quoted, table_rows

SOURCES = [
    path
    for folder in ("trl_stppo", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@cache
def fields() -> frozenset[str]:
    """Options: fields of the configurations and of the scripts' arguments, arguments of the trainers."""
    import inspect

    from trl import ModelConfig

    import trl_stppo
    from tests.kit.docs_scripts import argument_classes

    names: set[str] = set()
    configs = [trl_stppo.STPPOConfig, trl_stppo.STGRPOConfig, ModelConfig, *argument_classes()]
    for config in configs:
        names |= {spec.name for spec in dataclasses.fields(config)}
    for trainer in (trl_stppo.STPPOTrainer, trl_stppo.STPPOTrainer.train):
        names |= set(inspect.signature(trainer).parameters)
    return frozenset(names)


@cache
def identifiers() -> frozenset[str]:
    """Every name that occurs in the sources, comments and strings included; in some of TRL's, too."""
    names: set[str] = set()
    for path in [*SOURCES, *upstream_sources()]:
        names |= set(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    return frozenset(names)


def upstream_sources() -> list[Path]:
    """Of what pages name options, choices and figures without our code doing so."""
    names = ("trl.trainer.grpo_config", "transformers.trainer_utils", "transformers.training_args")
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]


# Words of other programs, in pages that are about them.
FOREIGN = {
    "nccl", "gloo", "posix_fallocate", "qa_em", "apply_chat_template",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_backticks_exist(page):
    """`name=value` anywhere is an option, or at least a name of the code."""
    for text in quoted(page):
        setting = re.fullmatch(r"([a-z]\w*)=.+", text)
        if setting and setting[1] not in FOREIGN:
            assert setting[1] in fields() | identifiers(), f"{page.name}: {text}"


@pytest.mark.parametrize("name", ["configuration", "evaluation", "environments", "reliability"])
def test_words_with_underscores_are_names_of_the_code(name):
    for text in quoted(DOCS / f"{name}.md"):
        if re.fullmatch(r"[a-z]{2,}(_[a-z0-9]+)+", text):
            assert text in fields() | identifiers(), f"{name}.md: {text}"


def test_functions_and_tests_of_the_algorithm_exist():
    checked = 0
    for page in (DOCS / "algorithm.md", DOCS / "contributing.md"):
        for text in quoted(page):
            if re.fullmatch(r"(core|trainer|rollout|models|envs)(\.\w+)+", text):
                resolve(f"trl_stppo.{text}")
                checked += 1
    assert checked > 10


def resolve(dotted: str) -> object:
    """The module, or the object in a module, of this name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Paths of the repository in backticks; `tests/x.py::test_y` names a test that is there."""
    for text in quoted(page):
        path, _, test = text.split(" ")[0].partition("::")
        if re.fullmatch(r"(tests|trl_stppo|scripts|benchmarks|docs)/[\w./-]+", path):
            file = ROOT / path
            assert file.exists(), f"{page.name}: {text}"
            if test:
                defined = {
                    n.name for n in ast.walk(ast.parse(file.read_text())) if hasattr(n, "name")
                }
                assert test in defined, f"{page.name}: {text}"


def test_every_equation_has_a_function_and_a_test():
    rows = [row for row in table_rows(DOCS / "algorithm.md") if len(row) == 5][:15]
    for what, _, function, tested, source in rows:
        assert function, what
        assert source, what
        for name in re.findall(r"test_\w+\.py", tested):
            assert list((ROOT / "tests").rglob(name)), name
