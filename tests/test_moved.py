"""Old names lead to what has moved, say so, and are no copies."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.fakes import char_tokenizer, tiny_policy
from trl_stppo import moved
from trl_stppo.agent import Agent
from trl_stppo.cli.agents import parse_flags
from trl_stppo.cli.evaluate import EvaluateArguments
from trl_stppo.cli.objects import factory_of, load_object
from trl_stppo.recipes.search import SearchEnv, StdlibSearchEnv, rewards

ROOT = Path(__file__).parents[1]
# What 0.1 and 0.2 have under these names.
OLD = [
    *("choices", "retrieval", "search", "search_prompts", "search_tags", "search_view", "squad"),
    *("stdlib_docs", "retrievers"),
    *(f"retrievers.{name}" for name in ("bm25", "bm25_build", "corpus", "dense")),
    *(f"retrievers.{name}" for name in ("folders", "remote", "specs")),
]
OLD = [f"trl_stppo.envs.{name}" for name in OLD]
OLD += [
    "trl_stppo.rewards",
]


@pytest.fixture(autouse=True)
def _not_yet_imported():
    """Under their old names."""
    yield
    for name in [name for name in sys.modules if moved.new_name(name)]:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if moved.new_name(parent) is None:
            vars(sys.modules[parent]).pop(child, None)


@pytest.mark.parametrize("old", OLD)
def test_an_old_module_is_the_new_one(old):
    if old.endswith(("bm25", "bm25_build")):
        pytest.importorskip("bm25s")
    new = str(moved.new_name(old))
    message = rf"^{re.escape(old)} has moved to {re.escape(new)}; the old name goes in 0\.3"
    with pytest.warns(DeprecationWarning, match=message):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__name__ == found.__spec__.name == new


def test_new_names_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for new in {*moved.MODULES.values(), "trl_stppo.envs", "trl_stppo.recipes.search"}:
            importlib.import_module(new)


def test_every_form_of_import_finds_it_and_blames_who_imports():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import trl_stppo.envs.search as whole
        from trl_stppo.envs.retrievers.corpus import PassageStore

        from trl_stppo import rewards as function_module
        from trl_stppo.envs import SearchEnv as from_package
        from trl_stppo.envs import retrieval
    assert whole.SearchEnv is from_package is SearchEnv
    assert function_module is rewards
    assert retrieval.__name__ == "trl_stppo.recipes.search.retrieval"
    assert PassageStore.__module__ == "trl_stppo.recipes.search.retrievers.corpus"
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("name", sorted(moved.NAMES["trl_stppo.envs"]))
def test_a_name_that_has_left_a_module_is_found(name):
    import trl_stppo.envs

    with pytest.warns(DeprecationWarning, match=rf"envs.{name} has moved .*recipes.search.{name};"):
        assert getattr(trl_stppo.envs, name) in (SearchEnv, StdlibSearchEnv)
    assert name not in trl_stppo.envs.__all__


def test_what_never_was_is_still_missing():
    with pytest.raises(ImportError, match="nothing_like_it"):
        from trl_stppo.envs import nothing_like_it  # noqa: F401
    with (
        pytest.warns(DeprecationWarning, match="has moved"),
        pytest.raises(ModuleNotFoundError, match=r"retrievers\.x"),
    ):
        importlib.import_module("trl_stppo.envs.retrievers.x")
    for name in ("trl_stppo.envs.searching", "trl_stppo.database", "data", "trl_stppo"):
        assert moved.new_name(name) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trl_stppo.envs:SearchEnv", SearchEnv),
        ("trl_stppo.envs.search:StdlibSearchEnv", StdlibSearchEnv),
        ("trl_stppo.rewards:f1_reward", rewards.f1_reward),
    ],
)
def test_flags_and_files_may_have_old_names(old, new, tmp_path):
    with pytest.warns(DeprecationWarning, match="has moved"):
        assert load_object(old) is new
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"environment": old, "reward_funcs": [old], "figures": [old]}))
    args = parse_flags(EvaluateArguments, ["--config", str(path), "--use_cpu", "--bf16", "false"])[
        0
    ]
    assert (args.environment, args.reward_funcs, args.figures) == (old, [old], [old])
    assert factory_of(args.environment, None) is new


def test_a_command_shows_the_new_name():
    command = [
        "env",
        "check",
        "trl_stppo.envs:SearchEnv",
        "--row",
        '{"prompt": "q", "answers": ["a"]}',
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trl_stppo", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "trl_stppo.envs.SearchEnv has moved to trl_stppo.recipes.search.SearchEnv" in done.stderr


@pytest.mark.parametrize(
    "path",
    ["trl_stppo.envs.search:SearchEnv", "trl_stppo.envs:SearchEnv", "trl_stppo:envs.SearchEnv"],
)
def test_an_agent_knows_its_environment_by_its_old_name(path):
    agent = Agent(tiny_policy(char_tokenizer()), char_tokenizer())
    agent.settings.environments.append({"name": None, "import": path})
    with pytest.warns(DeprecationWarning, match="has moved"):
        assert agent.environment_class(["trl_stppo"]) is SearchEnv


@pytest.mark.parametrize(
    "path", ["trl_stppo.envs.search:Any", "trl_stppo.envs.stdlib_docs:json.codecs"]
)
def test_an_old_name_leads_no_further_than_a_new_one(path):
    agent = Agent(tiny_policy(char_tokenizer()), char_tokenizer())
    agent.settings.environments.append({"name": None, "import": path})
    with pytest.raises(ValueError, match="none of the trusted packages"):
        agent.environment_class(["trl_stppo"])
    agent.settings.environments[0]["import"] = "trl_stppo.envs.search:SearchEnv"
    with pytest.raises(ValueError, match="none of the trusted packages"):
        agent.environment_class(["another"])


def test_a_pickle_with_an_old_name_is_read():
    assert pickle.loads(b"ctrl_stppo.envs.search\nSearchEnv\n.") is SearchEnv
