"""Who may import whom: nothing upward, nothing sideways, TRL through one door, light parts light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_stppo"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What environments and their adapters play, and how they look a tool over.
ENV_PACKAGES = {
    "PIL",
    *("datasets", "transformers"),
    *("gem", "mcp", "numpy"),
}

# part -> (own parts it may import, outside packages at the top of a module, ... inside a function)
RULES = {
    "core": ({"core", "errors"}, {"torch"}, set()),
    "envs": ({"envs", "errors"}, set(), ENV_PACKAGES),
    "generation": ({"generation", "errors"}, {"torch", "transformers"}, set()),
    "rollout": (
        {"rollout", "generation", "core", "envs", "errors"},
        {"torch"},
        {"PIL", "dill", "httpx2", "openai"},
    ),
    "models": (
        {"models", "errors", "paths"},
        {"torch", "transformers", "accelerate", "peft", "safetensors"},
        set(),
    ),
    "hub": (
        {"hub", "watch", "errors", "paths", "version"},
        {"huggingface_hub"},
        {"huggingface_hub", "torch", "transformers", "peft", "safetensors"},
    ),
    "agent": ({"hub", "trainer", "rollout", "generation"}, set(), set()),
    # The console script talks to TRL by its public names alone.
    "cli": (
        {
            "agent", "cli", "hub", "trace", "trainer", "models", "rollout", "generation", "envs",
            "watch", "errors", "paths", "statistics", "version",
        },
        {"torch", "transformers", "datasets", "rich", "yaml", "trl"},
        {"accelerate", "huggingface_hub", "peft", "psutil", "torch", "transformers", "vllm"},
    ),
    "__main__": ({"cli"}, set(), set()),
    "trace": ({"trace", "errors"}, set(), set()),
    "watch": ({"watch", "errors"}, {"rich", "transformers"}, {"matplotlib", "numpy", "rich"}),
    "trainer": (
        {
            *("trainer", "hub", "trace", "watch", "models", "rollout", "generation", "core"),
            *("envs", "errors", "paths", "statistics", "version"),
        },
        {"torch", "transformers", "tokenizers", "accelerate", "numpy", "datasets", "peft", "filelock"},
        {"deepspeed", "rich", "psutil", "safetensors", "vllm"},
    ),
    "__init__": ({"agent", "rollout", "version", "trainer", "watch"}, set(), set()),
}  # fmt: skip
STDLIB_ONLY = ({"errors"}, set(), set())
# What these files alone may import, TRL or a part that most of the trainer does without.
DOORS = {
    "trl": ["_trl.py", "_trl_vllm.py", "contract.py"],
    "hub": ["publisher.py", "setup/models.py", "setup/readers.py", "setup/run_plan.py"],
    "trace": ["recorder.py"],
    "watch": ["display.py"],
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Absolute dotted name, whether it is lazy (in a function or for type checkers), and the line."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(scope)
        for node in ast.walk(scope)
    }
    folder = ["trl_stppo", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) - node.level + 1], *filter(None, [node.module])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in inside, node.lineno


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_door(path: Path, part: str) -> bool:
    """Whether a file may import a part that only some files of the trainer may import."""
    files = [PACKAGE / "trainer" / name for name in DOORS.get(part, [])]
    return part_of(path) != "trainer" or part not in DOORS or path in files


def violations(path: Path) -> list[str]:
    own, eager, lazy = RULES.get(part_of(path), STDLIB_ONLY)
    found = []
    for name, is_lazy, line in imports(path):
        top, *rest = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if top == "trl_stppo":
            if not rest or rest[0] not in own or not is_door(path, rest[0]):
                found.append(where)
        elif top == "trl":
            public = top in eager and len(rest) == 1
            found += [] if public or (part_of(path) == "trainer" and is_door(path, top)) else [where]
        elif top not in sys.stdlib_module_names and top not in eager | (lazy if is_lazy else set()):
            found.append(where)
    return found


@pytest.mark.long
def test_imports_keep_to_the_layers():
    assert len(MODULES) > 100
    assert [line for path in MODULES for line in violations(path)] == []


def circle(depth: int | None = None) -> list[str]:
    """Modules, or folders of this depth, that import each other, lazily or for type checkers too."""
    modules = {dotted(path): path for path in PACKAGE.rglob("*.py")}

    def module_of(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    def room(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = {room(module_of(target)) for target, *_ in imports(path)}
        graph.setdefault(room(name), set()).update(targets - {room(name), ""})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@pytest.mark.long
def test_modules_import_in_no_circle():
    assert circle() == []


@pytest.mark.long
def test_folders_of_the_trainer_import_in_no_circle():
    assert circle(depth=3) == []


HEAVY = {"transformers", "trl", "peft", "datasets", "accelerate"}
LIGHT = {
    "trl_stppo": HEAVY | {"torch", "numpy", "pandas", "rich"},
    "trl_stppo.trace.page": HEAVY | {"torch", "numpy"},
    "trl_stppo.envs": HEAVY | {"torch", "bm25s", "numpy", "pandas", "rich"},
    "scripts.search.search_env.rewards": HEAVY | {"torch", "bm25s"},
    "trl_stppo.rollout.engine": HEAVY | {"torch"},
    "trl_stppo.rollout.isolation": HEAVY | {"torch", "dill"},
    "trl_stppo.cli": HEAVY | {"torch", "yaml", "rich"},
}
# Torch alone takes a second, transformers more.
HEAVIER = {"trl_stppo.core": HEAVY, "trl_stppo.models.small": {"trl", "peft", "datasets"}}
# Each module is imported by a fork of a Python that has imported none.
ALONE = """
import importlib, os, sys
for module, absent in MODULES.items():
    if not os.fork():
        importlib.import_module(module)
        print(module, *absent & set(sys.modules), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("modules", [LIGHT, pytest.param(HEAVIER, marks=pytest.mark.long)])
def test_light_parts_import_without_heavy_packages(modules):
    code = ALONE.replace("MODULES", repr(modules))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines() == [*modules], result.stderr
