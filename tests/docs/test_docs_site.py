"""`make docs` builds the site without a warning; the API reference has every option and public name."""

import dataclasses
import subprocess
import sys

import pytest

import trl_stppo
from tests.kit.docs_kit import DOCS, ROOT

pytest.importorskip("furo")
pytest.importorskip("myst_parser")
sys.path.append(str(DOCS / "_ext"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built as the Makefile builds them."""
    folder = tmp_path_factory.mktemp("site")
    command = next(
        line.split() for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line
    )
    words = command[command.index("-m") : -1]
    result = subprocess.run([sys.executable, *words, str(folder)], cwd=ROOT, capture_output=True, text=True)
    # Sphinx repeats itself for every page.
    said = "\n".join(dict.fromkeys(result.stderr.splitlines()))
    assert result.returncode == 0, said[-4000:]
    return folder


@pytest.mark.parametrize("name", ["PPOConfig", "STPPOConfig", "STGRPOConfig"])
def test_every_own_field_has_a_row(site, name):
    config = getattr(trl_stppo, name)
    page = (site / "api" / "configurations.html").read_text()
    own = [
        field.name for field in dataclasses.fields(config) if field.name in vars(config)["__annotations__"]
    ]
    assert len(own) > 3
    for field in own:
        assert page.count(f'id="{name.lower()}-{field.replace("_", "-")}"') == 1, field


def test_the_page_of_settings_is_what_their_metadata_say():
    import settings_table

    text = settings_table.PAGE.read_text()
    assert settings_table.written(text) == text
    assert len(settings_table.table()) == len(settings_table.NAMES) + 2
