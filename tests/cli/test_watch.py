"""`trl-stppo watch`: what it serves, to whom, and that it follows a run."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from tests.kit.trace_kit import made_up_run
from trl_stppo.cli.watch import server

HEAD = {"format": 1, "settings": {}, "steps_per_rollout": 8, "resumed": [16]}


def logged(folder, *successes):
    entries = [
        {"step": 8 * n, "episode/success_rate": s, "guard/falls": float(s < 0.3)}
        for n, s in enumerate(successes, 1)
    ]
    lines = [json.dumps(line) + "\n" for line in (HEAD, *entries)]
    (folder / "metrics.jsonl").write_text("".join(lines))


@contextmanager
def served(tmp_path, *folders):
    pages = tmp_path / "pages"
    pages.mkdir()
    running = server(list(folders), pages)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        running.shutdown()
        running.server_close()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.read().decode()


def test_curves_and_episodes_follow_a_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with served(tmp_path, run) as url:
        (before,) = json.loads(get(f"{url}/state"))
        assert (before["name"], before["panels"], before["episodes"]) == ("run", {}, "0-0")
        logged(run, 0.9, 0.2)
        made_up_run(run, updates=1)
        (now,) = json.loads(get(f"{url}/state"))
        assert now["panels"]["success"]["train"] == [[1, 0.9], [2, 0.2]]
        assert now["panels"]["success"]["falls"] == [2]
        assert now["resumed"] == [2]
        assert "3 episodes from 1 update" in get(f"{url}/episodes/0")
        made_up_run(run, updates=2)
        assert json.loads(get(f"{url}/state"))[0]["episodes"] != now["episodes"]
        assert "6 episodes from 2 updates" in get(f"{url}/episodes/0")


def test_a_damaged_log_leaves_the_episodes(tmp_path):
    made_up_run(tmp_path / "run", updates=1)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\nno json")
    with served(tmp_path, tmp_path / "run") as url:
        assert json.loads(get(f"{url}/state"))[0]["panels"] == {}


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/", "evil.example", 403), ("/state", "evil.example:80", 403), ("/episodes/1", None, 404),
     ("/episodes/-1", None, 404), ("/../metrics.jsonl", None, 404), ("/episodes/0", None, 404)],
)  # fmt: skip
def test_nothing_else_is_served_and_to_no_other_name(tmp_path, path, host, status):
    logged(tmp_path, 0.5)
    with served(tmp_path, tmp_path) as url, pytest.raises(urllib.error.HTTPError) as error:
        get(url + path, **({"Host": host} if host else {}))
    assert error.value.code == status
