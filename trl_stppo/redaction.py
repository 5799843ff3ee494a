"""Replace secrets in everything that is printed, saved or pushed.

A secret has a telling name (`hub_token`, `api_key`, `Authorization`, in dictionaries of any depth, in
JSON, in flags, in the query of a URL), or form (`hf_...`, `sk-...`, `http://user:password@host`).
"""

from __future__ import annotations

import json
import re
from typing import Any

HIDDEN = "***"

# Last words of a secret's name, alone ...
_SECRETS = {
    *("password", "passwords", "passwd", "passphrase", "pwd", "pass", "auth", "authorization"),
    *("secret", "secrets", "credential", "credentials", "cookie", "cookies", "jwt", "bearer"),
    *("apikey", "authkey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken"),
}
# ... or "keys" and "tokens" after one of these ("api_keys", "hf_tokens").
_OWNERS = {
    *("api", "access", "account", "app", "auth", "authorization", "bearer", "client", "csrf"),
    *("encryption", "github", "hf", "hub", "id", "identity", "license", "login", "master"),
    *("oauth", "openai", "anthropic", "private", "refresh", "secret", "security", "service"),
    *("session", "shared", "signing", "ssh", "subscription", "user", "wandb"),
}
# After one of these, "token" is a token of text.
_OF_TEXT = {
    *("additional", "audio", "begin", "bos", "cls", "decoder", "delimiter", "each", "end"),
    *("eos", "eot", "extra", "first", "image", "last", "mask", "max", "new", "next", "pad"),
    *("per", "separator", "sep", "special", "start", "stop", "think", "tool", "turn", "unk"),
    *("video", "vision", "whole", "word"),
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LOOKS = re.compile(
    r"""
    hf_[A-Za-z0-9]{20,}
  | (?<![\w-])(?:sk|pk|rk)-(?=[\w-]{0,200}\d)[\w-]{20,}         # OpenAI, Anthropic and others
  | gh[a-z]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
  | (?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35} | xox[a-z]-[\w-]{10,}
  | (?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*                 # a JSON web token
  | (?<=\bBearer\ )[^\s"'`]{6,} | (?<=\bbearer\ )[^\s"'`]{6,}
  | (?<=^Basic\ )[^\s"'`]{6,}$
  | (?<=://)[^\s/?\#@"'`]+(?=@)                                  # user and password of a URL
  | (?<=:/)[^\s/?\#@"'`:]+:[^\s/?\#@"'`]+(?=@)                   # ... that went through a `Path`
  | -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
# `name=`, `"name": `, `name: `, `--name `, and the value after it.
_NAME = re.compile(
    r"""(?<![\w-])(?:--(?P<flag>[A-Za-z][\w-]*)\s+|(?P<name>(?:--)?[A-Za-z_][\w-]*)\\*(?P<joint>["']?\s?[=:]\s*))"""
)
_VALUE = re.compile(
    r"""\\*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|["'][^"']*|(?:(?:[Bb]asic|[Bb]earer)\s+)?[^\s"'`,;&)}\]]+)"""
)


def is_secret(name: object) -> bool:
    """Return whether a setting with this name holds a secret, such as `hub_token`."""
    if not isinstance(name, str):
        return False
    words = [word.lower() for word in _WORD.findall(name)] or [""]
    *before, last = words
    owned = bool(before) and before[-1] in _OWNERS
    if last in ("token", "key"):
        return owned or (last == "token" and (not before or before[-1] not in _OF_TEXT))
    return last in _SECRETS or "password" in words or (last in ("tokens", "keys") and owned)


def redacted(value: Any, *, blank: Any = HIDDEN) -> Any:
    """Replace the secrets in text or nested data. Without secrets, the same object is returned.

    `blank` replaces a dictionary's value under the name of a secret.
    """
    if isinstance(value, str):
        return _text(value)
    if type(value) is dict:
        found = {
            name: blank if is_secret(name) and _has_value(part) else redacted(part, blank=blank)
            for name, part in value.items()
        }
        return value if all(found[name] is value[name] for name in value) else found
    if type(value) in (list, tuple):
        parts = [redacted(part, blank=blank) for part in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    return value


def _has_value(value: Any) -> bool:
    """Return whether a value can be a secret. Empty values, bools and special tokens cannot."""
    if isinstance(value, str):
        return bool(value) and not re.fullmatch(r"<[^<>]*>|\[[A-Z]+\]", value)
    return value is not None and not isinstance(value, bool)


def _text(text: str) -> str:
    if text.lstrip()[:1] in ("{", "["):
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            found = redacted(read)
            return text if found is read else json.dumps(found, ensure_ascii=False)
    found = _without_named(_LOOKS.sub(HIDDEN, text))
    return text if found == text else found


def _without_named(text: str) -> str:
    """Hide the values that follow the name of a secret in a text, as in `token=...`."""
    parts, at = [], 0
    for match in _NAME.finditer(text):
        if match.start() < at or not is_secret(match["flag"] or match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value is None:
            continue
        secret = value[0].strip("\\\"'")
        quoted = secret != value[0]
        if not _has_value(secret) or secret in ("None", "null", "True", "true", "False", "false"):
            continue
        if match["flag"] and secret.startswith("--"):
            continue
        sentence = (match["joint"] or "").lstrip()[:1] == ":" and not quoted
        if sentence and re.fullmatch(r"[A-Za-z]+[.!?]?", secret):  # as in "the token: try again"
            continue
        start = value.start() + value[0].find(secret)
        parts.append(text[at:start] + HIDDEN)
        at = start + len(secret)
    return "".join(parts) + text[at:]
