"""Metrics, options, functions and tests that the documentation names exist; no metric is missing there."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs_kit import CODE, DOCS, PAGES, ROOT, quoted, table_rows

PREFIXES = (
    *("policy", "clip_bias", "value", "advantage", "turns", "episode", "stop_reason", "guard"),
    *("perf", "sampling", "objective", "rewards", "completions", "tools"),
)
METRIC = re.compile(rf"(?:eval_)?(?:{'|'.join(PREFIXES)})/[\w<>*/{{}}.]+")
SOURCES = [
    path
    for folder in ("trl_stppo", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# transformers' own figures, and those of single functions' names.
METRICS_OF_OTHERS = {"loss", "grad_norm", "learning_rate", "epoch"}


def documented_metrics() -> set[str]:
    """The names of the first columns of the figures of docs/watching.md."""
    rows = table_rows(DOCS / "watching.md", "Figures")
    names = {name for row in rows for name in CODE.findall(row[0])}
    return names | METRICS_OF_OTHERS


def is_documented(metric: str, names: set[str]) -> bool:
    """Whether it is one of the names, `*` and `<function>` standing for anything."""
    if metric.endswith("/*"):
        return any(name.startswith(metric[:-1]) for name in names)
    patterns = (re.sub(r"\\\*|<\w+>", "[^/]+", re.escape(name)) for name in names)
    return any(re.fullmatch(pattern, metric) for pattern in patterns)


@cache
def evaluation_figures() -> frozenset[str]:
    """What docs/evaluation.md lists, with the endings that it abbreviates."""
    names = set()
    for row in table_rows(DOCS / "evaluation.md", "Figures"):
        found = CODE.findall(row[0])
        for name in found:
            names |= {name, *(f"{found[0]}{end}" for end in found if end.startswith("_"))}
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_are_named_are_documented(page):
    names = documented_metrics() | evaluation_figures()
    for name in quoted(page):
        if METRIC.fullmatch(name):
            bare = re.sub(r"^eval_(\w+_)?(?=episode)", "", name).removeprefix("eval_")
            assert is_documented(bare, names), f"{page.name}: {name}"


def test_metrics_in_the_code_are_documented():
    names = documented_metrics() | evaluation_figures()
    found = set()
    for path in SOURCES:
        if path.is_relative_to(ROOT / "trl_stppo" / "trainer"):
            found |= set(re.findall(rf"\"({METRIC.pattern})\"", path.read_text()))
    assert len(found) > 40
    for name in found:
        shown = re.sub(r"\{\w+(\.\w+)?\}", "x", name)
        assert "{" in name or is_documented(shown, names), name


def test_a_metric_that_does_not_exist_is_noticed():
    assert not is_documented("policy/clip_rate", documented_metrics())
    assert is_documented("rewards/exact_match_reward/mean", documented_metrics())


def test_every_metric_says_what_is_healthy_and_what_to_do():
    for row in table_rows(DOCS / "watching.md", "Figures"):
        assert len(row) == 4, row
        assert row[1], row


# ---------------------------------------------------------------------------- options


@cache
def fields() -> frozenset[str]:
    """Options: fields of the configurations and of the scripts' arguments, arguments of the trainers."""
    import inspect

    from trl import ModelConfig

    import trl_stppo
    from tests.docs_scripts import argument_classes

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


ADVICE = [
    *(("reliability", under) for under in ("The run does not learn", "The run breaks")),
    *(("reliability", under) for under in ("Episodes", "Memory and time")),
    ("watching", "Figures"),
]


@pytest.mark.parametrize(("name", "under"), ADVICE)
def test_options_in_advice_exist(name, under):
    metrics = documented_metrics() | evaluation_figures()
    for text in quoted(DOCS / f"{name}.md", under):
        option = re.fullmatch(r"([a-z]+(?:_[a-z0-9]+)+)(=.*)?", text)
        if option and option[1] not in metrics | KNOWN_WORDS:
            assert option[1] in fields(), f"{name}.md: {text}"


# Not options: functions, columns and files that advice names.
KNOWN_WORDS = {
    *("check_env", "output_dir", "stop_reason", "py_spy", "paged_adamw_8bit", "rollout_func"),
    *("train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second"),
    *("total_flos", "aux_loss", "num_tokens", "chat_template"),
}


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


# ------------------------------------------------------------------- algorithm and paths


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


def test_an_equation_without_a_function_is_noticed():
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("trl_stppo.core.ratios.no_such_ratio")


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
