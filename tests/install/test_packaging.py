"""What setup.cfg promises: ranges that are pinned somewhere, package data, sources that old Pythons read."""

import configparser
import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
# Extras whose packages the tests do without, and which are therefore not pinned.
UNPINNED = {"deepspeed", "gem", "vllm"}


def requirements(block: str) -> list[Requirement]:
    lines = (line.strip() for line in block.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "%"))]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(package): version for package, version in pairs}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lowest(requirement: Requirement) -> str | None:
    bounds = [spec.version for spec in requirement.specifier if spec.operator == ">="]
    return bounds[0] if bounds else None


REQUIRED = requirements(CONFIG["options"]["install_requires"])
EXTRAS = {
    name: requirements(block)
    for name, block in CONFIG["options.extras_require"].items()
    if not name.startswith("#")
}


def test_every_package_that_tests_need_is_pinned_to_a_version_in_its_range():
    pinned = pins("constraints.txt")
    wanted = REQUIRED + [r for name, rs in EXTRAS.items() if name not in UNPINNED for r in rs]
    for folder in ("scripts/pretrained", "tests/agents"):
        listed = requirements((ROOT / folder / "requirements.txt").read_text())
        wanted += [r for r in listed if "==" not in str(r.specifier)]
    for requirement in wanted:
        version = pinned.get(normal(requirement.name))
        assert version is not None, f"constraints.txt has no pin of {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


def test_the_oldest_versions_are_the_lower_ends_of_the_ranges():
    wanted = REQUIRED + [r for n in ("test", "search", "quantization", "plot") for r in EXTRAS[n]]
    expected = {normal(r.name): lowest(r) for r in wanted if lowest(r)}
    same = {name: _padded(v) for name, v in pins("constraints-oldest.txt").items()}
    assert same == {name: _padded(v) for name, v in expected.items()}


def _padded(version: str | None) -> list[int]:
    parts = [int(part) for part in str(version).split(".")]
    return parts + [0] * (3 - len(parts))
