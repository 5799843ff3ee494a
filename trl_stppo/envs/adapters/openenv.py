"""Adapter of environments on an OpenEnv server."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import MissingPackageError
from ..base import Info
from ._common import action_text


class NoAction(ValueError):
    """Error that `to_action` raises if a turn has no action. The message becomes the observation."""


def _read_json(text: str) -> dict[str, object]:
    """Return the JSON object in a turn's action. This is the default `to_action`."""
    try:
        action = json.loads(action_text(text))
    except ValueError:
        action = None
    if not isinstance(action, dict):
        raise NoAction('Write one JSON object, for example <action>{"name": "value"}</action>.')
    return action


def _write_json(observation: object) -> str:
    """Return a text unchanged, and any other observation as JSON. This is the default `to_text`."""
    if isinstance(observation, str):
        return observation
    as_dict = getattr(observation, "model_dump", None)
    return json.dumps(as_dict() if callable(as_dict) else observation, default=str)


class OpenEnvSession:
    """A session with an OpenEnv server. A client with a method `sync` is used through `sync()`."""

    def __init__(
        self,
        client: Any,
        *,
        to_action: Callable[[str], object] = _read_json,
        to_text: Callable[[Any], str] = _write_json,
        is_success: Callable[[Any], bool] | None = None,
        reset_columns: Sequence[str] = ("seed",),
        invalid_reward: float = 0.0,
    ) -> None:
        """Create a session. The first reset connects to the server.

        Args:
            client: an OpenEnv client, a callable that makes one, or a server's address (which needs
                `openenv`; actions and observations are then dictionaries). Sessions must not share a
                client: in a factory, pass a callable or an address.
            to_action: text of a turn -> the client's action. It raises NoAction if there is none. The
                message of this error, or of a server that rejects the action, becomes the observation.
            to_text: observation -> text.
            is_success: last result -> whether the task was solved; None if this is not known.
            reset_columns: columns of the row for the client's `reset`.
            invalid_reward: reward of a turn without an action.
        """
        self._source = client
        self._to_action = to_action
        self._to_text = to_text
        self._is_success = is_success
        self._reset_columns = tuple(reset_columns)
        self._invalid_reward = float(invalid_reward)
        self._client: Any = None

    def _connect(self) -> Any:
        source = self._source
        if isinstance(source, str):
            try:
                from openenv.core import GenericEnvClient
            except ImportError as error:
                raise MissingPackageError("openenv") from error
            return GenericEnvClient(base_url=source)
        # A class is a factory, although it has the attribute `reset`.
        is_factory = isinstance(source, type) or not hasattr(source, "reset")
        return source() if is_factory else source

    def reset(self, **row: object) -> tuple[str, Info]:
        """Start an episode on the server."""
        if self._client is None:
            client = self._connect()
            self._client = client.sync() if callable(getattr(client, "sync", None)) else client
        columns = {name: row[name] for name in self._reset_columns if row.get(name) is not None}
        return self._to_text(self._client.reset(**columns).observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Implement `TextEnv.step`: send one action to the server."""
        try:
            result = self._client.step(self._to_action(action))
        except (ValueError, RuntimeError) as error:
            if not isinstance(error, NoAction) and "VALIDATION_ERROR" not in str(error):
                raise
            return str(error), self._invalid_reward, False, False, {"valid_action": False}
        info = {"valid_action": True}
        if result.done and self._is_success is not None:
            info["success"] = bool(self._is_success(result))
        reward = 0.0 if result.reward is None else float(result.reward)
        return self._to_text(result.observation), reward, bool(result.done), False, info

    def close(self) -> None:
        """End the session on the server."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
