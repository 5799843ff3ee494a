"""The built wheel holds the whole package and nothing else, and works in an environment without anything."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trl_stppo"
COPIED = ("trl_stppo", "tests", "scripts", "docs", "benchmarks")
FILES = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
FILES += (
    "Makefile", "constraints.txt", "constraints-oldest.txt", "constraints-vllm.txt", "ruff.toml",
)  # fmt: skip

pytestmark = pytest.mark.slow


def run(*words: object, cwd: Path) -> str:
    result = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist of a copy of the sources, and the wheel that was built from the sdist."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "_build", ".*")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def sources() -> set[str]:
    """Every file of the package."""
    return {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_is_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    outside = {name for name in names if ".dist-info/" not in name}
    assert outside == sources()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)


def test_the_sdist_has_what_tests_and_documentation_need(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {*FILES, "tests/conftest.py", "tests/install/test_wheel.py", "docs/migration.md"}
    needed |= {"scripts/configs/demo.yaml", "scripts/assets/search-agent/config.json"}
    needed |= {"scripts/search/search_env/stdlib/train.jsonl.gz"}
    assert sources() | needed <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("runs")]


def test_a_clean_environment_imports_it_and_has_the_command(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    code = (
        "import trl_stppo, trl_stppo.envs, trl_stppo.rollout.engine;"
        "print(trl_stppo.__version__, trl_stppo.__file__)"
    )
    version, path = run(python, "-I", "-c", code, cwd=tmp_path).split()
    assert wheel.name.startswith(f"trl_stppo-{version}-")
    assert str(tmp_path) in path
    assert version in run(tmp_path / "venv" / "bin" / "trl-stppo", "--version", cwd=tmp_path)
