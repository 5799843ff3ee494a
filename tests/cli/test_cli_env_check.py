"""`trl-stppo env check`: a report for clean, careless and broken environments."""

import contextlib
import importlib
import json
import threading

import openai
import pytest

from tests.kit.fakes import CHAT_TEMPLATE, char_tokenizer
from trl_stppo.cli import env_check
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


NO_TOOLS = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHAT_TEMPLATE
ADDS = ["--action", 'add {"a": 2}', "--action", "bye"]


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


# --------------------------------------------------------------------------------- agents


def say(client, **options):
    messages = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(model="policy", messages=messages, **options)


async def careful(client, row):
    await say(client)
    return 1.0


async def rowless(client, row=None):
    await say(client)
    return 1.0


def adding(client, row):
    schema = {"name": "add", "parameters": {"type": "object"}}
    answer = say(client, tools=[{"type": "function", "function": schema}], temperature=0.1)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 2}
    say(client)


async def stubborn(client, row):
    while True:
        with contextlib.suppress(openai.PermissionDeniedError):
            await say(client)


async def broken(client, row):
    raise RuntimeError("no database")


async def deaf(client, row):
    with contextlib.suppress(openai.OpenAIError):
        await client.chat.completions.create(model="gpt", messages=[])
    return 0.0


async def unlimited(client, row):
    while True:
        await say(client)


def hanging(client, row):
    threading.Event().wait()


@pytest.mark.parametrize("agent", ["careful", "rowless"])
def test_a_clean_agent(check, agent):
    code, shown = check(agent, "--strict")
    assert code == 0
    assert "calls 1" in shown


def test_an_agent_gets_the_actions_as_turns_and_calls_of_its_tools(check):
    code, shown = check("adding", *ADDS)
    assert code == 0
    assert "calls 2, tools add, returns None" in shown
    assert "warning: `temperature`" in shown
    assert "no reward" in shown
    assert check("adding", *ADDS, "--strict")[0] == 1


def test_a_call_of_an_unknown_tool_is_an_answer_with_a_warning(check):
    code, shown = check("careful", "--action", 'nosuch {"a": 2}')
    assert code == 0
    assert 'warning: `nosuch {"a": 2}`' in shown


def test_an_agent_that_does_not_catch_its_limit_gets_no_warning_of_its_reward(check):
    code, shown = check("unlimited", "--steps", "2", "--strict")
    assert code == 0
    assert "calls 3" in shown


@pytest.mark.parametrize(("name", "part"), [
    ("broken", "RuntimeError: no database (test_cli_env_check.py:"),
    ("hanging", "longer than 0.2 s"),
    ("stubborn", "after"),
    ("deaf", "no call that can be answered"),
])  # fmt: skip
def test_what_an_agent_does_wrong_is_an_error(check, monkeypatch, name, part):
    if name == "hanging":
        monkeypatch.setattr(env_check, "SECONDS", 0.2)
    code, shown = check(name)
    assert code == 1
    assert part in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(("name", "template", "problem"), [
    ("Garden", CHAT_TEMPLATE, "cannot render tool calls"),
    ("adding", NO_TOOLS, "no tools here"),
    ("adding", CHAT_TEMPLATE, None),
    ("Clean", CHAT_TEMPLATE, None),
])  # fmt: skip
def test_a_models_template_must_render_the_tools(check, tmp_path, name, template, problem):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    actions = ADDS if name == "adding" else []
    code, shown = check(name, "--model", str(tmp_path), *actions)
    assert code == int(problem is not None), shown
    assert problem is None or problem in shown
    assert "Traceback" not in shown
