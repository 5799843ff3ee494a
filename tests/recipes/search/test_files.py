"""Folders built aside: what is replaced, what never is, and what failures leave behind."""

import json
import os
from pathlib import Path

import pytest

from trl_stppo.recipes.search.files import built_aside, check_target


def owned(folder: Path) -> set[str]:
    return {"list.json", *json.loads((folder / "list.json").read_text())}


def build(target: Path, text: str = "new", **settings) -> None:
    with built_aside(target, owned, **settings) as building:
        (building / "data").write_text(text)
        (building / "list.json").write_text('["data"]')


@pytest.fixture
def target(tmp_path) -> Path:
    """An earlier result."""
    build(tmp_path / "parent" / "x", "old")
    return tmp_path / "parent" / "x"


def beside(target: Path) -> list[str]:
    return os.listdir(target.parent)


def test_it_appears_at_the_end_and_can_be_read_by_all(tmp_path):
    target = tmp_path / "a" / "b" / "x"
    with built_aside(target, owned) as building:
        (building / "data").write_text("new")
        assert not target.exists()
        assert building.parent.parent == target.parent
    (tmp_path / "plain").mkdir()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert beside(target) == ["x"]


def test_an_earlier_result_is_replaced_only_if_asked(target):
    with pytest.raises(FileExistsError, match=r"overwrite=True \(--overwrite\)"):
        build(target)
    assert (target / "data").read_text() == "old"
    build(target, overwrite=True)
    assert (target / "data").read_text() == "new"
    assert beside(target) == ["x"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "x").mkdir()
    build(tmp_path / "x")
    assert (tmp_path / "x" / "data").exists()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "notes").write_text("mine"), "holds notes besides"),
        (lambda folder: (folder / "list.json").write_text("{"), "no earlier result of this kind"),
        (lambda folder: (folder / "list.json").unlink(), "no earlier result of this kind"),
    ],
)
def test_what_is_not_ours_is_never_replaced(target, spoil, message):
    spoil(target)
    before = {path.name: path.read_text() for path in target.iterdir()}
    with pytest.raises(FileExistsError, match=message):
        build(target, overwrite=True)
    with pytest.raises(FileExistsError, match=message):
        check_target(target, owned, overwrite=True)
    assert {path.name: path.read_text() for path in target.iterdir()} == before
    assert beside(target) == ["x"]


def test_files_and_links_are_never_replaced(target):
    link, broken, file = (target.with_name(name) for name in ("link", "broken", "file"))
    link.symlink_to(target)
    broken.symlink_to("nowhere")
    file.write_text("mine")
    for path, message in ((link, "symbolic link"), (broken, "symbolic link"), (file, "is a file")):
        with pytest.raises(FileExistsError, match=message):
            build(path, overwrite=True)
    assert (file.read_text(), link.is_symlink(), broken.is_symlink()) == ("mine", True, True)
    assert (target / "data").read_text() == "old"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_meanwhile_is_left_alone(tmp_path, overwrite):
    target = tmp_path / "x"
    with pytest.raises(FileExistsError), built_aside(target, owned, overwrite=overwrite):
        build(target, "another's")
    assert (target / "data").read_text() == "another's"
    assert os.listdir(tmp_path) == ["x"]


def test_what_was_replaced_meanwhile_is_left_alone(target):
    with (
        pytest.raises(FileExistsError, match="meanwhile"),
        built_aside(target, owned, overwrite=True),
    ):
        build(target, "another's", overwrite=True)
    assert (target / "data").read_text() == "another's"
    assert beside(target) == ["x"]


def failing_rename(monkeypatch, *places: int) -> None:
    calls, rename = [], Path.rename

    def fail(self, goal):
        calls.append(goal)
        if len(calls) - 1 in places:
            raise OSError("no rename")
        return rename(self, goal)

    monkeypatch.setattr(Path, "rename", fail)


@pytest.mark.parametrize("place", [0, 1])
def test_a_failed_rename_puts_the_earlier_result_back(target, monkeypatch, place):
    failing_rename(monkeypatch, place)
    with pytest.raises(OSError, match="no rename"):
        build(target, overwrite=True)
    assert (target / "data").read_text() == "old"
    assert beside(target) == ["x"]


def test_what_cannot_be_put_back_is_kept(target, monkeypatch):
    failing_rename(monkeypatch, 1, 2)
    with pytest.raises(OSError, match="no rename"):
        build(target, overwrite=True)
    (left,) = target.parent.iterdir()
    assert left.name.startswith(".x.building-")
    assert [path.name for path in left.iterdir()] == ["earlier"]
    assert (left / "earlier" / "data").read_text() == "old"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing(target, error):
    def failing() -> None:
        with built_aside(target, owned, overwrite=True) as building:
            (building / "half").write_text("x")
            raise error

    with pytest.raises(error):
        failing()
    assert (target / "data").read_text() == "old"
    assert beside(target) == ["x"]
