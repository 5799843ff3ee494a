"""Dense retrieval with a real faiss index and an encoder that hashes words."""

import hashlib
from pathlib import Path

import pytest

from tests.kit.script_kit import scripts
from trl_stppo.recipes.search.retrieval import Passage, Retriever

np = pytest.importorskip("numpy")

with scripts():
    from search_index import DenseIndex, DenseSettings, build_dense, dense

PASSAGES = [
    Passage("Heap", "a heap is a tree"), Passage("Queue", "first in first out"),
    Passage("", "a tree has leaves"), Passage("Twin", "same text"), Passage("Twin", "same text"),
]  # fmt: skip
SETTINGS = DenseSettings("hash")


class HashEncoder:
    """Counts words in buckets; the first bucket says how the text began."""

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self.seen: list[str] = []

    def __call__(self, texts: list[str]):
        self.seen += texts
        vectors = np.zeros((len(texts), self.size))
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().replace("query: ", "").replace("passage: ", "").split():
                row[int(hashlib.sha256(word.encode()).hexdigest(), 16) % self.size] += 1
        return vectors


@pytest.fixture
def folder(tmp_path) -> Path:
    pytest.importorskip("faiss")
    build_dense(PASSAGES, tmp_path / "x", SETTINGS, encode=HashEncoder(), batch_size=2)
    return tmp_path / "x"


def test_the_nearest_passage_comes_first(folder) -> None:
    index = DenseIndex(folder, encode=HashEncoder())
    assert isinstance(index, Retriever)
    assert len(index) == 5
    assert index.search("tree heap", 1) == [PASSAGES[0]]
    assert index.search("leaves", 1) == [PASSAGES[2]]
    (first, similarity), *rest = index.ranked("first in first out queue", 9)
    assert (first, similarity) == (PASSAGES[1], pytest.approx(1.0))
    assert len(rest) == 4
    scores = [score for _, score in rest]
    assert scores == sorted(scores, reverse=True)


def test_prefixes_tell_questions_from_passages(folder) -> None:
    encoder = HashEncoder()
    DenseIndex(folder, encode=encoder).search("tree", 1)
    assert encoder.seen[-1] == "query: tree"
    build_dense(PASSAGES[:3], folder.with_name("y"), SETTINGS, encode=encoder)
    assert "passage: Heap\na heap is a tree" in encoder.seen
    assert "passage: a tree has leaves" in encoder.seen


def test_nothing_asked_nothing_found(folder) -> None:
    index = DenseIndex(folder, encode=HashEncoder())
    assert index.search("  \n", 3) == []
    with pytest.raises(ValueError, match="top_k is 0"):
        index.search("tree", 0)


def test_an_index_that_learns_gets_its_vectors_first(tmp_path) -> None:
    pytest.importorskip("faiss")
    passages = [Passage(f"t{i}", f"word{i} word{i + 1} word{i * 7}") for i in range(300)]
    learning = {"factory": "IVF4,Flat", "batch_size": 32, "train_passages": 200}
    built = build_dense(passages, tmp_path / "x", SETTINGS, encode=HashEncoder(), **learning)
    assert built == 300
    index = DenseIndex(tmp_path / "x", encode=HashEncoder())
    hits = sum(index.search(f"{p.title} {p.text}", 1) == [p] for p in passages)
    assert hits > 280
    assert len(index.search("word1", 300)) < 300


def test_an_encoder_by_name_is_loaded_by_sentence_transformers(folder, monkeypatch) -> None:
    named = []
    monkeypatch.setattr(
        dense, "_sentence_encoder", lambda name: named.append(name) or HashEncoder()
    )
    index = DenseIndex(folder)
    assert named == ["hash"]
    assert index.search("tree heap", 1) == [PASSAGES[0]]


def test_a_real_sentence_transformers_model(tmp_path) -> None:
    pytest.importorskip("faiss")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = sorted({w for p in PASSAGES for w in f"{p.title} {p.text}".split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=16, **sizes)
    BertModel(config).save_pretrained(tmp_path / "bert")
    fast.save_pretrained(tmp_path / "bert")
    name = str(tmp_path / "model")
    sentence_transformers.SentenceTransformer(str(tmp_path / "bert")).save(name)
    build_dense(PASSAGES, tmp_path / "x", DenseSettings(name, "", ""))
    index = DenseIndex(tmp_path / "x")
    assert index.search("Queue\nfirst in first out", 1) == [PASSAGES[1]]
