"""From messages to ids: append-only, sampled tokens kept as they are."""

import pytest

from tests.kit.episodes import EOS, ids, text
from tests.kit.fakes import char_tokenizer
from trl_stppo.rollout.chat import ChatRenderer, with_opening

# Shows the number of messages at the front, so that earlier ids change when a message is added.
COUNTING = (
    "{{ messages | length }}"
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }} {{ m['content'] }}<|im_end|>{% endfor %}"
)
# Drops what the assistant said before the last user message, as templates for reasoning models do.
FORGETTING = (
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}"
    "<|im_start|>{{ m['role'][0] }} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
NEWLINES = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }} {{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a {% endif %}"
)
SIGNED = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ name }} {% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }};{% endfor %}"


def renderer(template: str | None = None, **kwargs) -> ChatRenderer:
    return ChatRenderer(char_tokenizer(), [EOS], chat_template=template, template_kwargs=kwargs)


CUT = ids("x")[0]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("observation", "last", "expected"), [
    ("more", EOS, "[u more][a "),
    ("more", CUT, "][u more][a "),
    ("", EOS, "[u ][a "),
    ("", CUT, "][u ][a "),
])  # fmt: skip
def test_an_observation_is_the_suffix_that_the_template_adds(observation, last, expected):
    assert text(renderer().observation_ids(user(observation), last=last)) == expected


def test_what_a_template_writes_after_the_end_of_turn_belongs_to_the_observation():
    chat = renderer(NEWLINES)
    for last, expected in ((EOS, "\n[u x]\n[a "), (CUT, "]\n[u x]\n[a ")):
        assert text(chat.observation_ids(user("x"), last=last)) == expected


def test_template_kwargs_reach_the_template():
    chat = renderer(SIGNED, name="bot")
    assert text(chat.observation_ids(user("x"), last=EOS)) == "[u x][bot "


def test_a_template_that_rewrites_earlier_messages_is_noticed():
    assert not renderer(COUNTING).preserves_turns()
    assert renderer(NEWLINES).preserves_turns()
    assert text(renderer(COUNTING).observation_ids(user("x"), last=EOS)) == "[u x]"


def test_a_template_that_leaves_out_earlier_turns_is_refused():
    with pytest.raises(ValueError, match=r"leaves out a turn.*chat_template"):
        renderer(FORGETTING).observation_ids(user("x"), last=EOS)


def test_a_template_without_an_end_of_turn_token_is_refused():
    with pytest.raises(ValueError, match=r"does not end an assistant message .*eos_token"):
        renderer(ENDLESS).preserves_turns()


@pytest.mark.parametrize(("prompt", "observation", "expected"), [
    ("look: ", "a door", "look: a door"),
    ("look", "", "look"),
    (
        [{"role": "system", "content": "s"}, {"role": "user", "content": "look: "}],
        "a door",
        [{"role": "system", "content": "s"}, {"role": "user", "content": "look: a door"}],
    ),
])  # fmt: skip
def test_the_opening_is_appended_to_the_last_message(prompt, observation, expected):
    assert with_opening(prompt, observation) == expected


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_the_opening_is_a_user_message_of_its_own_after_what_is_not_read(role):
    prompt = [{"role": role, "content": "s"}]
    assert with_opening(prompt, "a door") == [*prompt, {"role": "user", "content": "a door"}]
