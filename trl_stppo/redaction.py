"""Replace secrets in everything that is printed, saved or pushed.

A secret has a known form (`hf_...`, `sk-...`, `http://user:password@host`), or it follows a name: any value
after `api_key`, `password` or `Authorization`, and a long random word after `token` or `key`.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

# Names whose value is always a secret, and names whose value is a secret if it looks random.
_SECRET = (
    r"(?:(?:access|api|auth|hf|hub|private|secret|session)[_-]?(?:key|token)|pass(?:word|wd|phrase)"
    r"|authorization|cookie|credential|secret)s?"
)
_MAYBE = r"(?:key|token)s?"
_RANDOM = r"(?=[^\s\d]*\d)[\w+/.~-]{20,}=*"
# Values that are no secrets: null values, switches, and special tokens.
_OPEN = r"(?!(?:none|null|true|false)\b|--|<|\[)"
_FORMS = re.compile(
    r"""
    hf_[A-Za-z0-9]{20,}
  | (?<![\w-])(?:sk|pk|rk)-(?=[\w-]{0,200}\d)[\w-]{20,}
  | gh[a-z]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
  | (?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35} | xox[a-z]-[\w-]{10,}
  | (?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*
  | (?<=\b[Bb]earer\ )[^\s"'`]{6,}
    # User and password of a URL. A URL that went through a `Path` has one slash.
  | (?<=://)[^\s/?\#@"'`]+(?=@) | (?<=:/)[^\s/?\#@"'`:]+:[^\s/?\#@"'`]+(?=@)
  | -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
# `name=`, `"name": `, `name: ` or `--name `, and the value after it, which may be in quotes.
_NAMED = re.compile(
    rf"""((?:(?<!-)--[\w-]{{0,60}}{_SECRET}\s+|{_SECRET}\\*["']?\s?[=:]\s*)\\*(["'])?(?:(?:basic|bearer)\s+)?)"""
    rf"""{_OPEN}(?(2)[^"'\\]+|[^\s"'`,;&)}}\]]+)"""
    rf"""|({_MAYBE}\\*["']?\s?[=:]\s*\\*["']?){_RANDOM}""",
    re.IGNORECASE,
)


def is_secret(name: object, value: object) -> bool:
    """Return whether a setting with this name and value is a secret."""
    found = _NAMED.search(f"{name}={value!s:.100}")
    return found is not None and found.start() < len(str(name))


def redacted(value: Any, *, blank: Any = HIDDEN) -> Any:
    """Replace the secrets in text or nested data. Without secrets, the same object is returned.

    `blank` replaces a dictionary's value under the name of a secret.
    """
    if isinstance(value, str):
        found: Any = _NAMED.sub(lambda m: (m[1] or m[3]) + HIDDEN, _FORMS.sub(HIDDEN, value))
    elif type(value) is dict:
        found = {
            name: blank if is_secret(name, part) else redacted(part, blank=blank)
            for name, part in value.items()
        }
    elif type(value) in (list, tuple):
        found = type(value)(redacted(part, blank=blank) for part in value)
    else:
        return value
    return value if found == value else found
