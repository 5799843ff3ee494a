"""Small copies of the Hub's repositories, file by file in the layouts that the search recipe reads."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows in the form that the file's name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flashrag(folder: Path, name: str, split: str, rows: list[tuple[str, Any]], **columns: Any) -> None:
    """One file of FlashRAG's collection: questions with their golden answers."""
    lines = [
        {"id": f"{split}_{i}", "question": question, "golden_answers": answers, **columns}
        for i, (question, answers) in enumerate(rows)
    ]
    write(folder / FLASHRAG / name / f"{split}.jsonl", lines)


def medical(folder: Path) -> None:
    """The three sets with choices."""
    options = {"A": "Aspirin", "B": "Biotin", "C": "Codeine", "D": "Digoxin"}
    for split in ("train", "test"):
        row = {"question": f"A {split} patient\n needs what?", "answer": "Codeine"}
        row |= {"options": options, "meta_info": "step1", "answer_idx": "C"}
        file = f"GBaker/MedQA-USMLE-4-options/phrases_no_exclude_{split}.jsonl"
        write(folder / file, [{**row, "metamap_phrases": ["patient"]}])
    texts = {"opa": "Iron", "opb": "Zinc", "opc": "Lead", "opd": "Gold"}
    for split in ("train", "validation", "test"):
        row = {"id": f"m-{split}", **texts, "choice_type": "single", "exp": None}
        write(
            folder / f"openlifescienceai/medmcqa/data/{split}-00000-of-00001.parquet",
            [
                {**row, "question": "Which is true?", "cop": -1 if split == "test" else 0},
                {**row, "question": "Which is true?", "opa": "Tin", "cop": 3},
                {**row, "question": f"{split}: which is not?", "opd": "", "cop": 1},
            ],
        )
    for config in ("pqa_labeled", "pqa_artificial"):
        context = {"contexts": ["First.", "Second."], "labels": ["A", "B"], "meshes": ["m"]}
        row = {"context": context, "long_answer": "Long."}
        write(
            folder / f"qiaojin/PubMedQA/{config}/train-00000-of-00001.parquet",
            [
                {**row, "pubid": 7, "question": f"Does {config} work?", "final_decision": "maybe"},
                {**row, "pubid": 8, "question": f"Is {config} open?", "final_decision": None},
            ],
        )
