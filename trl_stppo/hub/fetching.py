"""From a name to a folder: what of a repository is needed, and never code or pickles."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from ..errors import HubError
from ..redaction import redacted

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
# What makes a policy and its tokenizer.
_PLAIN = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
# Folders besides it, a second copy of the weights in another format, what a checkpoint has besides.
_NOT = ("*/*", "consolidated*.safetensors", "trainer_state.json")


def policy_folder(
    name: str, revision: str | None = None, token: str | bool | None = None, *, code: bool = False
) -> Path:
    """A folder with a policy, its tokenizer and `agent.json`, downloaded if need be.

    Args:
        name: of a folder, or of a repository on the Hub.
        revision: of the repository.
        token: for a repository that is not public.
        code: fetch its Python files as well, for a caller who trusts them.

    Raises:
        HubError: there is neither, or it cannot be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    wanted = [*_PLAIN, *(["*.py"] if code else [])]
    try:
        found = snapshot_download(
            name, revision=revision, token=token, allow_patterns=wanted, ignore_patterns=list(_NOT)
        )  # fmt: skip
    except Exception as error:
        raise unreachable(name, revision, error) from error
    return Path(found)


def unreachable(name: str, revision: str | None, error: Exception) -> HubError:
    """The error for a repository that cannot be downloaded."""
    at = f" at revision {revision!r}" if revision else ""
    return HubError(
        f"{name!r}{at} is no folder here and could not be downloaded: {_first_line(error)} Check the "
        f"name and the revision, log in with `hf auth login` if the repository is private, or pass the "
        f"path of a folder. What has arrived is kept, and a second try goes on from there."
    )


def critic_folder(
    name: str, subfolder: str, revision: str | None = None, token: str | bool | None = None
) -> Path | None:
    """The folder of the critic that was published with a policy; None where there is none.

    Args:
        name: of a folder or a repository.
        subfolder: where a critic is in it.
        revision: of the repository.
        token: for a repository that is not public.

    Raises:
        HubError: the repository is there, but its critic could not be downloaded.
    """
    if Path(name).is_dir():
        folder = Path(name) / subfolder
        return folder if folder.is_dir() else None
    try:
        wanted = [f"{subfolder}/*", "config.json", ADAPTER_CONFIG]  # a pattern must match something
        found = snapshot_download(name, revision=revision, token=token, allow_patterns=wanted)
    except LocalEntryNotFoundError:  # offline, or no repository: whoever loads the model will say
        return None
    except Exception as error:
        raise unreachable(name, revision, error) from error
    folder = Path(found) / subfolder
    return folder if folder.is_dir() else None


def _first_line(error: BaseException) -> str:
    text = redacted(" ".join(str(error).split())) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        text = f"HTTP {error.response.status_code}: {text}"
    return text[:400].rstrip(".") + "."
