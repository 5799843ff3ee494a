"""`trl-stppo env check`: a report for clean, careless and broken environments."""

import importlib
import json

import pytest

from trl_stppo.cli.main import main


class Clean:
    """Counts down from the row's number."""

    def __init__(self, step_size: int = 1) -> None:
        self.step_size = step_size

    def reset(self, **row):
        self.left = int(row.get("number", 2))
        return f"{self.left} left. "

    def step(self, action: str):
        self.left -= self.step_size
        ended = self.left <= 0
        info = {"valid_action": True} | ({"success": True} if ended else {})
        return f"{self.left} left. ", 1.0, ended, False, info


class Garden:
    """One tool."""

    def reset(self, **row):
        return "A garden."

    def dig(self, depth: int) -> str:
        """Dig a hole.\n\nArgs:\n    depth: how deep."""
        if depth < 2:
            raise ValueError("too shallow")
        return "deep"


class Wrong(Clean):
    def step(self, action: str):
        return "x", "much", False, False, {}


class Open(Clean):
    alive = 0

    def __init__(self) -> None:
        super().__init__()
        Open.alive += 1

    async def close(self) -> None:
        Open.alive -= 1


@pytest.fixture
def check(capsys):
    def run(name: str, *words: str) -> tuple[int, str]:
        code = main(["env", "check", f"test_cli_env_check:{name}", *words])
        return code, "".join(capsys.readouterr())

    return run


def test_what_breaks_the_contract_is_an_error(check):
    code, shown = check("Wrong")
    assert code == 1
    assert "error: Wrong.step returned" in shown
    assert "Traceback" not in shown


def test_every_instance_is_closed(check):
    assert check("Open")[0] == 0
    module = importlib.import_module("test_cli_env_check")
    assert module.Open.alive == 0


def test_warnings_fail_on_request(check):
    words = ("--action", 'dig {"depth": 1}')
    code, shown = check("Garden", *words)
    assert code == 0
    assert "warning: " in shown
    assert check("Garden", *words, "--strict")[0] == 1
    assert "No tool is called" not in shown
    assert "No tool is called" in check("Garden")[1]
    code, shown = check("Garden", "--action", "up")
    assert code != 0
    assert "'up'" in shown
    assert check("Garden", "--action", "dig {")[0] == 2
    code, shown = check("Clean", "--strict")
    assert code == 0
    assert "0 warnings" in shown


def test_rows_are_read_from_a_file_of_json_lines(check, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a: ", "number": n}) for n in range(1, 11)))
    code, shown = check("Clean", "--rows", str(path), "--arguments", '{"step_size": 2}')
    assert code == 0
    assert "played 8 rows" in shown
    assert "played 1 rows" in check("Clean", "--row", '{"number": 1}')[1]
