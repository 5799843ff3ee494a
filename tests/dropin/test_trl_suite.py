"""TRL's tests of GRPOTrainer, played by our trainers: a table says how each ends, and may only get better.

`python tests/dropin/test_trl_suite.py --record` writes the table anew, from the folder that TRL_TESTS names.
A reason for "inside" or "wrong" is kept where it was written by hand; new failures say so and want one.
"""

import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# pytest sets the path itself.
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.kit.dropin_suite import run

FOLDER = Path(os.environ.get("TRL_TESTS", "TRL_TESTS is not set"))
TABLE = Path(__file__).with_name("trl_suite.json")
TRAINERS = ("STPPO", "STGRPO")

# What a test may end with: pattern of the exception.
REFUSED = {
    "loss_type": r"`loss_type=",
    "scale_rewards": r"`scale_rewards=",
    "aggregation": r"`multi_objective_aggregation=",
    "entropy filter": r"`top_entropy_quantile=",
    "adaptive entropy": r"`use_adaptive_entropy=",
    "accumulation": r"`steps_per_generation=\d+` must be a multiple",
    "images for a reward model": r"`processing_class` is a \w+, .* with a reward model",
}
DIFFERS = {
    "eval_loss": r"'eval_(data1_)?loss'",
    # A run that ends with a rollout has its figures in the log before the last, which is of the run.
    "log keys": r"'(policy_loss|entropy|entropy_coef|tools/call_frequency)'",
}
# What the others say of themselves, after a colon and in a few words.
JUDGED = {
    "inside": "the test looks inside GRPOTrainer, or at its very wording",
    "upstream": "TRL's own trainer fails here as well",
    "wrong": "our fault",
}
# How many end wrongly. Lower it with each that is mended.
WRONG = {"STPPO": 0, "STGRPO": 0}


def label(outcome: str) -> str:
    """How a test has ended, as far as its exception tells."""
    for word, known, kinds in (
        ("refused", REFUSED, "ValueError|NotImplementedError"),
        ("differs", DIFFERS, "KeyError"),
    ):
        for name, pattern in known.items():
            if re.match(f"({kinds}): .*{pattern}", outcome):
                return f"{word}: {name}"
    return "passed" if outcome == "passed" else "failed"


def change(was: str, outcome: str) -> str:
    """Whether a test ends as the table says: "same", "better" or "worse"."""
    now = label(outcome)
    if now == was or (now == "failed" and was.partition(":")[0] in JUDGED):
        return "same"
    return "worse" if now == "failed" or was == "passed" else "better"


def read_table() -> dict[str, dict[str, str]]:
    """Test -> trainer -> how it ends."""
    return json.loads(TABLE.read_text())


def test_the_table_says_for_each_test_how_it_ends():
    table = read_table()
    assert list(table) == sorted(table)
    words = {"passed", *(f"refused: {n}" for n in REFUSED), *(f"differs: {n}" for n in DIFFERS)}
    for trainer, wrong in WRONG.items():
        ends = [row[trainer] for row in table.values() if trainer in row]
        assert not [e for e in ends if e not in words and e.partition(": ")[0] not in JUDGED]
        assert Counter(e.partition(":")[0] for e in ends)["wrong"] == wrong


@pytest.mark.slow
@pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"{FOLDER}: set it to the folder `tests` of a checkout of TRL"
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_more_of_trls_tests_fail(trainer, tmp_path):
    table = read_table()
    changed: dict[str, list[str]] = {"same": [], "better": [], "worse": []}
    for test, outcome in run(FOLDER, trainer, tmp_path / "work").items():
        was = table.get(test, {}).get(trainer, "not in the table")
        changed[change(was, outcome)].append(f"{test}\n    was {was}, now: {outcome[:300]}")
    if changed["better"]:
        warnings.warn("The table can be improved:\n" + "\n".join(changed["better"]), stacklevel=1)
    assert not changed["worse"], "\n".join(changed["worse"])


def judged(outcome: str, was: str, upstream: str) -> str:
    """What the table says of a test."""
    now = label(outcome)
    if now != "failed":
        return now
    if was.partition(":")[0] in ("inside", "wrong"):
        return was
    return f"wrong: {outcome.splitlines()[0][:90]}" if upstream == "passed" else "upstream"


def new_table(seen: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The table of these outcomes: trainer -> test -> how it ended."""
    old, table = read_table() if TABLE.is_file() else {}, {}
    for test in sorted({test for outcomes in seen.values() for test in outcomes}):
        upstream = label(seen["GRPO"][test])
        table[test] = {"TRL": upstream}
        for name in TRAINERS:
            was = old.get(test, {}).get(name, "")
            table[test][name] = judged(seen[name][test], was, upstream)
    return table


def record() -> None:
    """Run our trainers and TRL's own, and write the table."""
    with tempfile.TemporaryDirectory() as work:
        seen = {name: run(FOLDER, name, Path(work) / name) for name in (*TRAINERS, "GRPO")}
    lines = [f"{json.dumps(test)}: {json.dumps(row)}" for test, row in new_table(seen).items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    assert sys.argv[1:] == ["--record"], __doc__
    record()
