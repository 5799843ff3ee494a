"""Names, files and links that the documentation gives exist; its defaults are the defaults."""

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import transformers.trainer_utils
import transformers.training_args
import trl.trainer.grpo_config

import trl_stppo
from tests.kit.docs_kit import GUIDE, PAGES, ROOT, links, quoted
from tests.kit.docs_scripts import argument_classes

UPSTREAM = trl.trainer.grpo_config, transformers.trainer_utils, transformers.training_args
# Words of other programs, in pages that are about them.
FOREIGN = {"nccl", "gloo", "posix_fallocate", "qa_em", "apply_chat_template"}
FOREIGN |= {path.stem for path in Path(trl.__file__).parent.glob("chat_templates/*.jinja")}
# Pages whose words with underscores, or with dots, are all names of the code.
OURS = {f"{name}.md" for name in ("configuration", "evaluation", "environments", "reliability")}
DOTTED = {"algorithm.md", "contributing.md"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def known() -> frozenset[str]:
    """Options of configurations and scripts, arguments of trainers, and every word of the sources."""
    kinds = [trl_stppo.STPPOConfig, trl_stppo.STGRPOConfig, trl.ModelConfig, *argument_classes()]
    names = {spec.name for kind in kinds for spec in dataclasses.fields(kind)}
    for function in (trl_stppo.STPPOTrainer, trl_stppo.STPPOTrainer.train):
        names |= set(inspect.signature(function).parameters)
    sources = [Path(module.__file__) for module in UPSTREAM]
    for folder in ("trl_stppo", "scripts", "benchmarks"):
        sources += (ROOT / folder).rglob("*.py")
    for path in sources:
        names |= set(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    return frozenset(names | FOREIGN)


def resolve(dotted: str) -> object:
    """The module, or the object in a module, of this name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(importlib.import_module(module), name)


def test_the_guide_has_few_pages():
    assert len(GUIDE) <= 21


@each_page
def test_names_in_backticks_exist(page):
    underscored = r"|([a-z]{2,}(?:_[a-z0-9]+)+)" if page.name in OURS else ""
    for text in quoted(page):
        name = re.fullmatch(r"([a-z]\w*)=.+" + underscored, text)
        # Pages of the lab keep the names of the commit at which they were measured.
        assert not name or page.parent.name == "lab" or (name[1] or name[2]) in known(), text
        path, _, test = text.split(" ")[0].partition("::")
        if re.fullmatch(r"(tests|trl_stppo|scripts|benchmarks|docs)/[\w./-]+", path):
            assert (ROOT / path).exists(), text
            assert not test or f"def {test}(" in (ROOT / path).read_text(), text
        dotted = re.fullmatch(r"(core|trainer|rollout|models|envs)(\.\w+)+", text)
        if dotted and page.name in DOTTED:
            resolve(f"trl_stppo.{text}")


@each_page
def test_links_lead_to_files(page):
    """Sphinx looks at headings, and at no page outside of docs/."""
    for target in links(page):
        url = urlsplit(target)
        assert url.scheme in ("", "https", "mailto"), target
        assert url.scheme or (page.parent / url.path).exists(), target
