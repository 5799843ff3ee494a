"""Every layout, read from files in that layout through `datasets`, and the errors on the way."""

import json

import pytest

from tests.kit.hub_copies import FLASHRAG, flashrag, medical, write
from tests.kit.script_kit import scripts

with scripts() as _module:
    _module("search_rows")
    from search_rows.loading import read_questions
    from search_rows.readers import Question
    from search_rows.sources import DATASETS, find_source


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
    assert third.answers == ()  # an empty choice

    for split, config in (("eval", "pqa_labeled"), ("train", "pqa_artificial")):
        first, second = read(tmp_path, "pubmedqa", split)
        assert first == Question(
            f"Does {config} work?", ("C",), ("yes", "no", "maybe"), "First. Second.", "7"
        )
        assert second.answers == ()


def test_hidden_answers_are_no_answers(tmp_path):
    """MedMCQA's test split has -1 for all of them; it is not used, and would give nothing."""
    medical(tmp_path)
    source = find_source("medmcqa")
    hidden = {"question": "?", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": -1}
    assert source.evaluation == "data/validation-*.parquet"
    assert source.layout.read(hidden).answers == ()


def test_addresses_on_the_hub():
    nq, medmcqa = find_source("nq"), find_source("medmcqa")
    assert nq.location("eval") == f"hf://datasets/{FLASHRAG}/nq/test.jsonl"
    assert nq.location("train", revision="refs/pr/5").startswith(
        f"hf://datasets/{FLASHRAG}@refs%2Fpr%2F5/nq/"
    )
    assert medmcqa.location("train", "copies") == (
        "copies/openlifescienceai/medmcqa/data/train-*.parquet"
    )


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"'squad'; known are nq, triviaqa, .*pubmedqa"):
        find_source("squad")
    assert len(DATASETS) == 10


@pytest.mark.parametrize("name", ["popqa", "bamboogle"])
def test_sets_without_training_rows_say_so(name):
    with pytest.raises(ValueError, match=f"{name} has no rows for --train .*--eval"):
        find_source(name).files("train")


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / FLASHRAG / "nq" / "test.jsonl"
    write(path, [{"id": "1", "question": "q?", "answers": ["a"]}])
    with pytest.raises(
        ValueError, match=r"nq: .*test.jsonl has no column golden_answers; found are id, question"
    ):
        read(tmp_path, "nq", "eval")


def test_a_missing_file_says_where_it_belongs(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"nq: no file matches .*{FLASHRAG}/nq/test.jsonl"):
        read(tmp_path, "nq", "eval")


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / FLASHRAG / "nq" / "test.jsonl"
    write(path, [{"id": "1", "question": "q?", "golden_answers": ["a"]}])
    path.write_text(path.read_text() + json.dumps({"id": "2"})[:-2])
    with pytest.raises(ValueError, match=r"nq: .*test.jsonl cannot be read"):
        read(tmp_path, "nq", "eval")


def test_without_network_the_way_out_is_named():
    with pytest.raises(ConnectionError, match=r"check the network and HF_HUB_OFFLINE.*--local DIR"):
        read_questions(find_source("nq"), "eval")
