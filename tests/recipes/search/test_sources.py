"""Every layout, read from files in that layout through `datasets`, and the errors on the way."""

import pytest

from tests.kit.hub_copies import flashrag, medical
from tests.kit.script_kit import scripts

with scripts() as _module:
    _module("search_rows")
    from search_rows.loading import read_questions
    from search_rows.readers import Question
    from search_rows.sources import find_source


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def read(folder, name, split) -> list[Question]:
    return list(read_questions(find_source(name), split, local=str(folder)))


def test_flashrag_files(tmp_path):
    """`metadata` differs from row to row, as in the collection; nothing of it is needed."""
    rows = [("who sings?", ["Ann ", "ann", "", "Bo"]), ("  when\n now? ", "1997")]
    for name, split in [("nq", "test"), ("musique", "dev"), ("2wikimultihopqa", "dev")]:
        flashrag(tmp_path, name, split, rows[:1], metadata={"supporting_facts": {"title": ["T"]}})
        kind = "train" if split == "train" else "eval"
        expected = [Question("who sings?", ("Ann", "ann", "Bo"), id=f"{split}_0")]
        assert read(tmp_path, name, kind) == expected
    flashrag(tmp_path, "hotpotqa", "train", rows[1:])
    expected = [Question("when now?", ("1997",), id="train_0")]
    assert read(tmp_path, "hotpotqa", "train") == expected


def test_the_medical_sets(tmp_path):
    medical(tmp_path)
    options = ("Aspirin", "Biotin", "Codeine", "Digoxin")
    expected = [Question("A test patient needs what?", ("C",), options)]
    assert read(tmp_path, "medqa", "eval") == expected

    first, second, third = read(tmp_path, "medmcqa", "eval")
    assert (first.answers, first.choices) == (("A",), ("Iron", "Zinc", "Lead", "Gold"))
    assert (second.answers, second.choices[0], second.id) == (("D",), "Tin", "m-validation")
    assert third.answers == ()

    for split, config in (("eval", "pqa_labeled"), ("train", "pqa_artificial")):
        first, second = read(tmp_path, "pubmedqa", split)
        assert first == Question(
            f"Does {config} work?", ("C",), ("yes", "no", "maybe"), "First. Second.", "7"
        )
        assert second.answers == ()
