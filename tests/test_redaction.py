"""What counts as a secret, and that nothing else does."""

import pytest

from trl_stppo.redaction import HIDDEN, is_secret, redacted

LOOKS_LIKE_ONE = "hf_" + "aB3" * 8
RANDOM = "9f86d081884c7d659a2feaa0c55ad015"


@pytest.mark.parametrize("name", [
    *("hub_token", "--hub_token", "hfToken", "HF_TOKEN", "use_auth_token", "access_tokens"),
    *("api_key", "apiKey", "X-API-Key", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "api_tokens"),
    *("password", "db_password", "client_secret", "Authorization", "Cookie"),
])  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name, "x")


@pytest.mark.parametrize("name", [
    *("eos_token", "pad_token", "stop_token", "stop_token_id", "max_new_tokens", "tokens"),
    *("max_turn_tokens", "token_level", "advantage_level", "tokenizer", "image_token"),
    *("secret_word", "answer_key", "author", "monkey", "pass_rate", "key", "keys", "", 3, None),
])  # fmt: skip
def test_names_of_other_things(name):
    assert not is_secret(name, "x")


@pytest.mark.parametrize(("value", "secret"), [
    *[(RANDOM, True), ("dGhpcyBpcyBhIHNlY3JldCE0Mg==", True), ("a-long-word-without-digits", False)],
    *[("<|im_end_of_this_turn_1|>", False), (1024, False), ("", False), ("short1", False)],
])  # fmt: skip
def test_a_token_or_a_key_is_known_by_its_value(value, secret):
    assert is_secret("service_token", value) == is_secret("key", value) == secret
    text = f"a key={value}, and more"
    assert redacted(text) == (f"a key={HIDDEN}, and more" if secret else text)


def test_a_secret_inside_a_text_hides_no_more_than_itself():
    given = {"prompt": "take api_key=x1 and go"}
    assert redacted(given) == {"prompt": f"take api_key={HIDDEN} and go"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a {LOOKS_LIKE_ONE}.", f"a {HIDDEN}."),
        ("sk-proj-abc123456789012345678901", HIDDEN),
        ("sk-learn-with-a-rather-long-name", None),
        ("ghp_abcdefghij0123456789", HIDDEN),
        ("AKIAIOSFODNN7EXAMPLE", HIDDEN),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", HIDDEN),
        ("401 for http://me:pw@host:80/a?api_key=x1&k=3", f"401 for http://{HIDDEN}@host:80/a?api_key={HIDDEN}&k=3"),
        ("mail a@b.c, see http://host/a@b", None),
        ("Authorization: Bearer abcdefgh", f"Authorization: Bearer {HIDDEN}"),
        ("[\"Bearer abcdefgh\"]", f"[\"Bearer {HIDDEN}\"]"),
        ("Authorization=Basic eHg6eXk=", f"Authorization=Basic {HIDDEN}"),
        ("kwargs={'hub_token': 'x', 'n': 1}", f"kwargs={{'hub_token': '{HIDDEN}', 'n': 1}}"),
        ('x={"password": 12, "api_key": "cut of', f'x={{"password": {HIDDEN}, "api_key": "{HIDDEN}'),
        (r'{\"api_key\": \"x\", \"k\": 1}', rf'{{\"api_key\": \"{HIDDEN}\", \"k\": 1}}'),
        ("train --hub_token x --k 1", f"train --hub_token {HIDDEN} --k 1"),
        (f"optim_args=token={RANDOM}", f"optim_args=token={HIDDEN}"),
        ("The token is missing. The token: try again", None),
        ("api_key=None, use_auth_token=True, stop_token='eos', password='<s>'", None),
        ("-----BEGIN PRIVATE KEY-----\nab\ncd", HIDDEN),
        *[(character * 100_000, None) for character in "[-ak"],
    ],
)  # fmt: skip
def test_texts(text, shown):
    assert redacted(text) == (text if shown is None else shown)


def test_what_has_no_secret_is_the_same_object_and_the_given_one_stays_as_it_was():
    plain = {"a": [1, ("b", None)], "eos_token": "<eos>", "api_key": None, "use_auth_token": True}
    assert redacted(plain) is plain
    given = {"kwargs": [{"hub_token": "x", "n": 1}], "url": ("http://u:p@h",), "password": 12}
    assert redacted(given) == {
        "kwargs": [{"hub_token": HIDDEN, "n": 1}],
        "url": (f"http://{HIDDEN}@h",),
        "password": HIDDEN,
    }
    assert given["kwargs"][0]["hub_token"] == "x"
    assert redacted(given, blank=None)["kwargs"][0]["hub_token"] is None
