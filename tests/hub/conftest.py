"""A Hub on this machine, and the real client pointed at it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants as constants
import huggingface_hub.file_download as file_download
import huggingface_hub.hf_api as hf_api
import huggingface_hub.utils._http as http
import pytest
import transformers.utils.hub as transformers_hub

from tests.hub.hub_server import TOKEN, LocalHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """An empty Hub; the client is logged in, has a cache of its own, and waits for nothing."""
    server = LocalHub()
    cache = str(tmp_path / "cache")
    # Xet is a storage of its own, in compiled code.
    known = {"ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    resolve = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    known |= {"HUGGINGFACE_CO_URL_TEMPLATE": resolve, "HF_HUB_CACHE": cache}
    for name, value in known.items():
        monkeypatch.setattr(constants, name, value)
    variables = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    for name, value in {**variables, "HF_HUB_CACHE": cache, "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
    # A request that fails is repeated without a pause.
    at_once = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in (http, file_download):
        monkeypatch.setattr(module, "time", at_once)
    yield server
    server.close()
    http.close_session()
