"""Make the standard library of the running Python a small corpus with questions about it.

    python3.11 scripts/makers/stdlib_questions.py

writes what `scripts/search/search_env` reads. Sources are read with `ast`, never imported, so
nothing is executed. The corpus differs a little between Python versions; the split does not, because it
hashes the asked name.
"""

import ast
import gzip
import hashlib
import json
import re
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

SEARCH = Path(__file__).parents[1] / "search"
sys.path.append(str(SEARCH))
from search_env.retrieval import Passage, words

Split = Literal["train", "test"]

SHIPPED = SEARCH / "search_env" / "stdlib"
MAX_WORDS = 16  # per passage: an observation of two has to stay near 60 tokens
_SKIPPED_MODULES = frozenset(
    {"antigravity", "distutils", "encodings", "idlelib", "lib2to3", "msilib", "nturl2path", "test"}
    | {"pydoc_data", "this", "tkinter", "turtledemo"}
)
_SKIPPED_PARTS = frozenset({"test", "tests"})
_ASKABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{2,23}")
_PLAIN_WORD = re.compile(r"[A-Za-z][A-Za-z0-9'-]*[.,;:]?")

QUESTIONS = {
    "function_module": "Which module defines the function {name}?",
    "class_module": "Which module defines the class {name}?",
    "method_class": "Which class defines the method {name}?",
    "method_module": "Which module defines the method {name}?",
    "class_base": "What is the base class of {name}?",
    "method_base": "What is the base class of the class that defines {name}?",
    "base_base": "What is the base class of the base class of {name}?",
    "base_module": "Which module defines the base class of {name}?",
}
_TEMPLATE_WORDS = frozenset({"base", "class", "function", "method", "module", "takes", "nothing"})
TWO_HOP_KINDS = frozenset({"method_base", "base_base", "base_module"})


@dataclass(frozen=True)
class Entry:
    """One documented thing: where it is defined and the beginning of its documentation."""

    kind: Literal["module", "class", "function", "method"]
    name: str
    module: str
    owner: str = ""  # the class of a method
    base: str = ""  # the first base of a class, last part of its name; "object" if it has none
    summary: str = ""

    def passage(self) -> Passage:
        """Return the passage of a search: one sentence of facts, then as much summary as fits."""
        facts = {
            "module": f"{self.name} is a module.",
            "class": f"{self.name} is a class in module {self.module} with base {self.base}.",
            "function": f"{self.name} is a function in module {self.module}.",
            "method": f"{self.name} is a method of class {self.owner} in module {self.module}.",
        }[self.kind]
        # The bare name as title: with it, BM25 ranks a class above the methods that mention it.
        return Passage(self.name, " ".join(f"{facts} {self.summary}".split()[:MAX_WORDS]))


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """Everything public that the standard library's Python sources define, in a fixed order.

    Raises:
        FileNotFoundError: this Python comes without its library's sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [entry for module, path in _sources(root) for entry in _read_module(module, path)]
    if not found:
        raise FileNotFoundError(
            f"no standard library sources under {root}; the corpus is made from them. "
            "Use a Python that ships its library as .py files."
        )
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1)
def passages() -> tuple[Passage, ...]:
    """One short passage per entry."""
    return tuple(entry.passage() for entry in entries())


def is_held_out(name: str) -> bool:
    """Whether questions about this name belong to the test split: three names in ten do."""
    return _digest(name) % 10 < 3


def questions(split: Split) -> list[dict[str, Any]]:
    """Questions of one split, shuffled in a fixed order; every fourth takes two searches.

    Only names that one search settles are asked: the name has a single definition, and no other
    passage is about it.

    Args:
        split: "train" or "test"; no name is asked in both.

    Returns:
        rows with prompt (one user message), answers, hops (1 or 2), kind and name.

    Raises:
        ValueError: unknown split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; allowed are 'train' and 'test'. Pick one of them.")
    rows = [row for row in _all_questions() if is_held_out(row["name"]) == (split == "test")]
    one_hop = [row for row in rows if row["hops"] == 1]
    two_hop = [row for row in rows if row["hops"] == 2]
    kept = [*one_hop[: 3 * len(two_hop)], *two_hop[: len(one_hop) // 3]]
    return sorted(kept, key=lambda row: _digest(row["kind"] + row["name"]))


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for top in sorted(sys.stdlib_module_names - _SKIPPED_MODULES):
        single = root / f"{top}.py"
        files = [single] if single.is_file() else sorted((root / top).rglob("*.py"))
        for path in files:
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") or part in _SKIPPED_PARTS for part in parts):
                yield ".".join(parts), path


def _read_module(module: str, path: Path) -> Iterator[Entry]:
    tree = ast.parse(path.read_bytes())
    yield Entry("module", module, "", summary=_summary(tree))
    for node in _definitions(tree.body):
        if isinstance(node, ast.ClassDef):
            base = _base_name(node)
            if base:
                yield Entry("class", node.name, module, base=base, summary=_summary(node))
            for method in _definitions(node.body):
                if not isinstance(method, ast.ClassDef):
                    yield Entry("method", method.name, module, node.name, summary=_summary(method))
        else:
            yield Entry("function", node.name, module, summary=_summary(node))


def _definitions(
    body: list[ast.stmt],
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public definitions, also those made under `if` and `try` for one platform or another."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            handlers = [part for handler in getattr(node, "handlers", []) for part in handler.body]
            yield from _definitions([*node.body, *handlers, *node.orelse])


def _base_name(node: ast.ClassDef) -> str:
    """The first base without its module; "" when it is an expression such as a call."""
    if not node.bases:
        return "object"
    base = node.bases[0]
    base = base.value if isinstance(base, ast.Subscript) else base
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""


def _summary(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """First words of the docstring, plain English only; a signature where there is none."""
    first_sentence = re.split(r"(?<=\.)\s|\n\s*\n", (ast.get_docstring(node) or "").strip())[0]
    plain = [word for word in first_sentence.split() if _PLAIN_WORD.fullmatch(word)]
    if len(plain) >= 3 or isinstance(node, ast.Module | ast.ClassDef):
        return " ".join(plain)
    arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    return f"It takes {', '.join(arguments[:3]) or 'nothing'}."


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@lru_cache(maxsize=1)
def _all_questions() -> tuple[dict[str, Any], ...]:
    """Every question that can be asked, in hash order, so that a prefix is a fair sample."""
    by_name: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries():
        by_name[entry.name.lower()].append(entry)
    repeated = Counter(
        word
        for passage in passages()
        for word, count in Counter(words(f"{passage.title} {passage.text}")).items()
        if count > 1
    )

    def lookup(name: str) -> Entry | None:
        """Return the definition that a search for the name shows first, if there is just one."""
        found = by_name[name.lower()] if _ASKABLE.fullmatch(name) else []
        clear = len(found) == 1 and repeated[name.lower()] == 1
        return found[0] if clear and name.lower() not in _TEMPLATE_WORDS else None

    rows = []
    for name in sorted({entry.name for entry in entries()}):
        asked = lookup(name)
        if asked is not None:
            rows += [_row(kind, name, answer) for kind, answer in _facts(asked, lookup)]
    return tuple(sorted(rows, key=lambda row: _digest(row["name"] + row["kind"])))


def _facts(entry: Entry, lookup: Callable[[str], Entry | None]) -> Iterator[tuple[str, str]]:
    """Kinds of question that can be asked about an entry, each with its answer."""
    if entry.kind == "function":
        yield "function_module", entry.module
    elif entry.kind == "class":
        yield "class_module", entry.module
        if entry.base != "object":
            yield "class_base", entry.base
            base = lookup(entry.base)
            if base is not None and base.base != "object":
                yield "base_base", base.base
            # Most classes share a module with their base: then the first search would do.
            if base is not None and base.module != entry.module:
                yield "base_module", base.module
    elif entry.kind == "method":
        yield "method_class", entry.owner
        yield "method_module", entry.module
        owner = lookup(entry.owner)
        if owner is not None and owner.base != "object":
            yield "method_base", owner.base


def _row(kind: str, name: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": QUESTIONS[kind].format(name=name)}],
        "answers": [answer],
        "hops": 2 if kind in TWO_HOP_KINDS else 1,
        "kind": kind,
        "name": name,
    }


def write(folder: Path) -> None:
    """Write passages and questions; the same bytes each time."""
    folder.mkdir(exist_ok=True)
    contents: dict[str, list[Any]] = {"train": questions("train"), "test": questions("test")}
    contents["passages"] = [[passage.title, passage.text] for passage in passages()]
    for name, rows in contents.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    write(SHIPPED)
