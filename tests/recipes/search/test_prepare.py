"""Split hygiene, limits, the report, and a folder that `load_dataset` reads."""

from pathlib import Path

import pytest

from scripts.search.search_env.protocol import SEARCH_PROMPT, SEARCH_PROMPT_CHOICES
from tests.kit.hub_copies import flashrag, medical
from tests.kit.script_kit import scripts

with scripts() as _module:
    _module("search_rows")
    from search_rows import prepare


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def copies(tmp_path) -> str:
    """Two sets to train and evaluate on, that overlap in every way, and one to evaluate on."""
    folder = tmp_path / "copies"
    train = [
        ("who sang it", ["Ann"]),
        ("Who sang it?", ["Ann again"]),
        ("where is the tower", ["Paris"]),
        ("what year", ["1997"]),
        ("nobody knows", []),
        ("nobody can say", ["  ", "?"]),
        ("", ["empty"]),
        ("who wrote it", ["Bo"]),
    ]
    flashrag(folder, "nq", "train", train)
    flashrag(folder, "nq", "test", [("Where is a Tower?", ["Paris"]), ("how far", ["a mile"])])
    shared = [("who wrote it?", ["Bo"]), ("which team", ["Reds"]), ("Job of x?", ["poet"])]
    flashrag(folder, "hotpotqa", "train", shared)
    flashrag(folder, "hotpotqa", "dev", [("What, year?", ["1997"]), ("how far", ["1 mile"])])
    flashrag(folder, "popqa", "test", [("job of x", ["poet"]), ("job of x", ["poet"])])
    return str(folder)


TRAIN, EVAL = ["nq", "hotpotqa"], ["nq", "popqa", "hotpotqa"]


def questions(rows) -> list[str]:
    return [row["question"] for row in rows]


def test_nothing_of_the_evaluation_is_trained_on_and_all_is_counted(copies):
    prepared = prepare(TRAIN, EVAL, local=copies)
    trained = questions(prepared.rows["train"])
    assert sorted(trained) == ["nobody can say", "which team", "who sang it", "who wrote it"]
    # Every evaluation set is whole, also where two of them ask the same.
    held_out = questions(prepared.rows["eval"])
    assert held_out == ["Where is a Tower?", "how far", "job of x", "What, year?", "how far"]
    assert prepared.report["train"]["nq"] == {
        "from": f"{copies}/RUC-NLPIR/FlashRAG_datasets/nq/train.jsonl",
        **{"read": 8, "kept": 3},
    }
    counts = prepared.report["train"]["hotpotqa"]
    assert (counts["read"], counts["kept"]) == (3, 1)
    assert prepared.report["eval"]["popqa"]["kept"] == 1


def test_limits_are_per_data_set_and_the_seed_decides(tmp_path):
    rows = [(f"question {i}", ["x"]) for i in range(50)]
    flashrag(tmp_path, "nq", "train", rows)
    flashrag(tmp_path, "hotpotqa", "train", [(f"other {q}", a) for q, a in rows])

    def drawn(seed, *names):
        found = prepare(names, local=str(tmp_path), max_train_rows=10, seed=seed)
        return questions(found.rows["train"])

    both = drawn(0, *TRAIN)
    assert len(both) == 20
    of_the_second = [q.startswith("other") for q in both]
    assert sum(of_the_second) == 10
    assert of_the_second != sorted(of_the_second)
    assert both == drawn(0, *TRAIN) != drawn(1, *TRAIN)
    assert {q for q in both if q.startswith("question")} == set(drawn(0, "nq"))
    assert set(drawn(1, "nq")) != set(drawn(0, "nq"))


def test_rows_as_the_trainer_takes_them(copies, tmp_path):
    medical(Path(copies))
    prepared = prepare(["nq"], ["medqa", "pubmedqa"], local=copies)
    row = next(r for r in prepared.rows["train"] if r["question"] == "who wrote it")
    system, user = row.pop("prompt")
    assert system["role"] == "system"
    assert system["content"] in SEARCH_PROMPT
    assert "<search>" in system["content"]
    assert user == {"role": "user", "content": "who wrote it"}
    about = {"dataset": "nq", "id": "train_7", "question": "who wrote it"}
    assert row == {"answers": ["Bo"], "choices": [], **about}
    medqa, pubmedqa = prepared.rows["eval"]
    assert medqa["prompt"][0]["content"] in SEARCH_PROMPT_CHOICES
    assert medqa["prompt"][1]["content"].splitlines() == [
        "A test patient needs what?",
        *("A) Aspirin", "B) Biotin", "C) Codeine", "D) Digoxin"),
    ]
    assert (medqa["answers"], medqa["choices"][2]) == (["C"], "Codeine")
    assert medqa["id"] == "medqa-0"
    assert pubmedqa["prompt"][1]["content"].startswith("Context: First. Second.\n\nQuestion: Does")
    without = prepare([], ["pubmedqa"], local=copies, context=False).rows["eval"][0]
    assert "First." not in without["prompt"][1]["content"]
