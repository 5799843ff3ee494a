"""The page of methods names every variant, and says of each what the code does."""

import itertools
import re

import pytest

from tests.kit.script_kit import ROOT
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

PAGE = (ROOT / "docs" / "methods.md").read_text()
PREFIXES = {"": ("token", False), "turn-": ("turn", False), "s-": ("token", True)}
PREFIXES |= {"st-": ("turn", True)}


def test_every_variant_has_a_row_and_no_row_another():
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "variant=" in line]
    flags = [re.findall(r'"([a-z-]+)"', row.split("|")[2]) for row in rows]
    assert sorted(itertools.chain(*flags)) == sorted({**VARIANTS, **GROUP_VARIANTS})
    for row in rows:
        assert re.search(r"arxiv\.org/abs/\d{4}\.\d{5}|this package", row), row
        assert len(row.split("|")[4]) > 10, row


@pytest.mark.parametrize("variant", [*VARIANTS, *GROUP_VARIANTS])
def test_the_parts_of_a_name_mean_what_the_page_says(variant):
    if variant == "gspo":
        return  # of the page's own row
    prefix, _, last = ("-" + variant).rpartition("-")
    prefix = prefix[1:] + "-" * bool(prefix)
    assert ({**VARIANTS, **GROUP_VARIANTS})[variant] == PREFIXES[prefix]
    assert f"| `{last}` |" in PAGE
    assert f"| {f'`{prefix}`' if prefix else 'none'} |" in PAGE
