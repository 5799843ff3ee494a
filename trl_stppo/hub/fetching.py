"""Find or download the folder of an agent, without code and pickles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ..errors import HubError
from ..paths import check_name
from .pushing import reason

ADAPTER_CONFIG = "adapter_config.json"
# Files of a policy and its tokenizer.
_PLAIN = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
# Folders, a second copy of the weights in another format, other files of a checkpoint.
_NOT = ("*/*", "consolidated*.safetensors", "trainer_state.json")


def policy_folder(
    name: str, revision: str | None = None, token: str | bool | None = None, *, code: bool = False
) -> Path:
    """Return the folder `name`, or download policy, tokenizer and `agent.json` from the repository `name`.

    `code` downloads Python files as well. A failed download raises `HubError`.
    """
    if Path(name).is_dir():
        return Path(name)
    check_name("name_or_folder", name)
    wanted = [*_PLAIN, *(["*.py"] if code else [])]
    options: Any = {"allow_patterns": wanted, "ignore_patterns": list(_NOT)}
    try:
        return Path(snapshot_download(name, revision=revision, token=token, **options))
    except Exception as error:
        raise unreachable(name, revision, error) from error


def unreachable(name: str, revision: str | None, error: Exception) -> HubError:
    """Return the error for a repository that cannot be downloaded."""
    at = f" at revision {revision!r}" if revision else ""
    return HubError(
        f"{name!r}{at} is no folder here and could not be downloaded: {reason(error)} Check name and "
        f"revision; a private repository needs `hf auth login`. A second try continues the download."
    )


def critic_folder(
    name: str, subfolder: str, revision: str | None = None, token: str | bool | None = None
) -> Path | None:
    """Return the folder of the critic published with a policy, or None if there is no critic.

    Raises:
        HubError: the repository exists, but its critic could not be downloaded.
    """
    # One of the patterns must match a file.
    wanted = [f"{subfolder}/*", "config.json", ADAPTER_CONFIG]
    found = name
    if not Path(name).is_dir():
        try:
            found = snapshot_download(name, revision=revision, token=token, allow_patterns=wanted)
        except LocalEntryNotFoundError:
            # Offline, or without a repository, loading the model raises.
            return None
        except Exception as error:
            raise unreachable(name, revision, error) from error
    folder = Path(found) / subfolder
    return folder if folder.is_dir() else None
