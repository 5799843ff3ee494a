"""The page in a browser: quick, to be used with keys alone, and nothing in an episode does anything."""

import json

import pytest

from tests.kit.trace_kit import HOSTILE, add_hostile, browser, made_up_run, open_page
from trl_stppo.trace import build_page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    made_up_run(folder, updates=20, per_update=5)
    add_hostile(folder, 21)
    return build_page(folder, folder / "page.html").path


@pytest.fixture(scope="module")
def session():
    with browser() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(session):
    session.get_log("browser")
    yield
    assert session.get_log("browser") == []


def ask(session, expression: str):
    return session.execute_script(f"return {expression}")


def wait(session, expression: str):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(session, 10).until(lambda s: s.execute_script(f"return {expression}"))


def press(session, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(session).send_keys(key).perform()


CONTROLS = {"button", "searchbox", "combobox", "spinbutton", "listbox", "option", "dialog"}


def spoken(session) -> list[tuple[str, str, bool]]:
    """Role and name of what can be used, and whether it has the focus, as a screen reader has it."""
    nodes = session.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    found = []
    for node in (node for node in nodes if not node["ignored"]):
        facts = {fact["name"]: fact["value"].get("value") for fact in node.get("properties", [])}
        focused = bool(facts.get("focused"))
        if focused or node["role"]["value"] in CONTROLS:
            found.append((node["role"]["value"], node["name"]["value"].strip(), focused))
    return found


HEADING = "document.querySelector('#episode h2')?.textContent"
TIP = "document.getElementById('tip').innerText"


def test_keys_alone_are_enough(session, page):
    from selenium.webdriver.common.keys import Keys

    open_page(session, page, "#updates-from=3&updates-to=3&episode=train-3-0")
    press(session, "j")
    wait(session, f"{HEADING} === 'Update 3, episode 1'")
    press(session, "j", "j", "k")
    wait(session, f"{HEADING} === 'Update 3, episode 2'")
    assert "episode=train-3-2" in ask(session, "location.hash")
    assert ask(session, "document.getElementById('colour').value") == "ratio"
    press(session, "c", "c", "c")
    assert ask(session, "document.getElementById('colour').value") == "advantage"
    assert "colour=advantage" in ask(session, "location.hash")
    press(session, "n")
    wait(session, f"{TIP}.includes('turn ratio')")
    first = ask(session, "document.activeElement.dataset.i")
    assert ask(session, "document.activeElement.closest('[data-turn]').dataset.turn") == "0"
    press(session, Keys.ARROW_RIGHT)
    assert int(ask(session, "document.activeElement.dataset.i")) == int(first) + 1
    session.find_element("id", "more").click()
    press(session, "n")
    controls = spoken(session)
    assert len({role for role, *_ in controls} & CONTROLS) >= 6
    assert [control for control in controls if not control[1]] == []
    word = json.dumps(ask(session, "document.activeElement.textContent"))
    assert ("group", word, True) in controls, "the token in focus, and none of the others"
    assert sum(role == "group" for role, *_ in controls) == 1
    press(session, Keys.ESCAPE)
    assert ask(session, "document.getElementById('tip').hidden")
    press(session, Keys.ESCAPE)
    assert ask(session, "document.activeElement.id") == "list"
    press(session, Keys.END)
    wait(session, f"{HEADING} === 'Update 3, episode 4'")
    press(session, "?")
    assert ask(session, "document.getElementById('help').open")
    press(session, Keys.ESCAPE)
    assert not ask(session, "document.getElementById('help').open")
    seen = []
    for _ in range(40):
        press(session, Keys.TAB)
        seen.append(
            ask(session, "(e => e.id || e.textContent.slice(0, 40))(document.activeElement)")
        )
        if len(seen) > 5 and seen[-1] == seen[0]:
            break
    assert {"theme", "q", "list", "colour"} <= set(seen)
    assert len(seen) < 40


def test_a_hostile_episode_is_but_text(session, page):
    open_page(session, page, "#episode=train-21-0")
    shown = ask(session, "document.querySelector('[data-turn] .tokens').textContent")
    for text in (*HOSTILE[:4], HOSTILE[9]):
        assert text in shown
    assert "U+202Eturned aroundU+2066U+0000" in shown
    assert "\u202e" not in ask(session, "document.body.innerText")
    assert "80000 more characters" in shown
    session.find_element("css selector", "button.mark").click()
    whole = ask(session, "document.querySelector('[data-turn] .tokens').textContent")
    assert "a" * 100_000 in whole
    markup = (
        "document.querySelectorAll('img:not(.picture), svg[onload], iframe, script[src]').length"
    )
    assert ask(session, markup) == 0
    assert ask(session, "document.querySelectorAll('script:not([type])').length") == 1
    with pytest.raises(Exception, match="no such alert"):
        _ = session.switch_to.alert.text
    press(session, "k")
    wait(session, f"!{HEADING}.includes('21')")
