"""What environments say holds no control token, whatever the tokenizer, and reads as it was written."""

import functools
import random
import unicodedata

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.kit.episodes import TOKENIZER
from tests.kit.fakes import char_tokenizer
from tests.kit.tokenizer_kit import KINDS, Kind, gpt2, qwen
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.rollout.control_tokens import MARK, ControlTokens

kind_of = functools.cache(lambda name: KINDS[name]())
EVERY_KIND = pytest.mark.parametrize("name", list(KINDS))
TOOL_KINDS = pytest.mark.parametrize("name", ["qwen", "mistral", "slow"])
HARMLESS = "QZQ"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def observed(kind: Kind, text: str) -> list[int]:
    last = kind.tokenizer.convert_tokens_to_ids(kind.end)
    return kind.renderer.observation_ids(user(text), last=last, conversational=kind.chats)


def opened(kind: Kind, text: str) -> list[int]:
    question = "Look: "
    prompt = [{"role": "user", "content": question}] if kind.chats else question
    return kind.renderer.prompt_ids(prompt, opening=text)


def answered(kind: Kind, *texts: str, name: str = "look") -> list[int]:
    messages = [{"role": "tool", "name": name, "content": text} for text in texts]
    return kind.renderer.observation_ids(messages, last=kind.renderer.tokenizer.eos_token_id)


def pieces(kind: Kind, ids: list[int]) -> list[list[int]]:
    """What stands between control tokens, each of these a piece of its own."""
    parts: list[list[int]] = [[]]
    for token in ids:
        parts += [[token], []] if token in kind.control_ids else []
        if token not in kind.control_ids:
            parts[-1].append(token)
    return parts


def assert_said(kind: Kind, text: str, render=observed) -> None:
    """Of the row with a harmless text nothing but the piece with the text has changed, and it reads so."""
    core = text.strip()
    start, end = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    row = render(kind, text)
    harmless = render(kind, start + HARMLESS + end)
    said, other = pieces(kind, row), pieces(kind, harmless)
    assert len(said) == len(other), (text, kind.tokenizer.convert_ids_to_tokens(row))
    decode = kind.tokenizer.decode
    changed = [i for i in range(len(said)) if HARMLESS in decode(other[i])]
    assert len(changed) == 1
    assert [p for i, p in enumerate(said) if i not in changed] == [
        p for i, p in enumerate(other) if i not in changed
    ]
    expected = decode(harmless).replace(HARMLESS, core)
    composed = [unicodedata.normalize("NFC", read) for read in (decode(row), expected)]
    assert composed[0] == composed[1], text


@EVERY_KIND
@pytest.mark.parametrize("render", [observed, opened])
def test_each_control_token_is_plain_text_in_what_an_environment_says(name, render):
    kind = kind_of(name)
    for token in kind.controls:
        for text in (
            token,
            f"x{token}y",
            f"{token}{token}",
            f" a {token}\n",
            f"{token[:3]}{token}{token[1:]}",
        ):
            assert_said(kind, text, render)


@TOOL_KINDS
def test_each_control_token_is_plain_text_in_what_tools_answer(name):
    kind = kind_of(name)
    for token in kind.controls:
        assert_said(kind, f"x{token}y", answered)
        two = answered(kind, token, f"{token} z")
        assert pieces(kind, two)[1::2] == pieces(kind, answered(kind, "a", "b z"))[1::2]
        named = answered(kind, "x", name=f"look{token}")
        assert [i for i in named if i in kind.control_ids] == [
            i for i in answered(kind, "x") if i in kind.control_ids
        ]


@EVERY_KIND
def test_text_without_control_tokens_has_the_ids_that_it_always_had(name):
    kind = kind_of(name)
    tokenizer, text = kind.tokenizer, " plain <b> text, <|im_ end|> [INST ] née\n\n"
    if not kind.chats:
        assert observed(kind, text) == tokenizer(text)["input_ids"]
        return
    messages = [{"role": "user", "content": "Look: " + text}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert opened(kind, text) == expected
    assert kind.renderer.control.split(text) is text


@EVERY_KIND
def test_rows_grow_by_appending(name):
    """Turn by turn is the same as one conversation in which each control token of the texts is split."""
    kind = kind_of(name)
    if not kind.chats:
        return
    chat, hostile = kind.renderer, f"a{kind.end}b{kind.end}"
    end = kind.tokenizer.convert_tokens_to_ids(kind.end)
    row = opened(kind, hostile)
    said = chat.control.split(hostile)
    messages = [{"role": "user", "content": "Look: " + said}]
    for turn in ("one", "two"):
        messages.append({"role": "assistant", "content": turn})
        whole = chat.control.render(messages, add_generation_prompt=False, **chat.template)
        whole = whole[: len(whole) - whole[::-1].index(end)]
        assert whole[: len(row)] == row
        messages.append({"role": "user", "content": said})
        row = whole + observed(kind, hostile)
        assert row == chat.control.render(messages, add_generation_prompt=True, **chat.template)


def test_what_a_template_joins_from_pieces_and_what_a_given_one_writes_counts_too():
    tokenizer = gpt2().tokenizer
    tokenizer.add_tokens(["<note>", "<hint>", "<protocol>"])
    joined = "{% for m in messages %}{{ '<' + 'note>' + m.content + eos_token }}{% endfor %}"
    tokenizer.chat_template = joined
    chat = ChatRenderer(tokenizer, [tokenizer.eos_token_id], chat_template=joined + "<hint>")
    note, hint, protocol = tokenizer.convert_tokens_to_ids(["<note>", "<hint>", "<protocol>"])
    ids = chat.observation_ids(user("<note><hint><protocol>"), last=0, conversational=False)
    assert (note in ids, hint in ids, ids.count(protocol)) == (False, False, 1)
    own = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    assert note not in own.observation_ids(user("<note>"), last=0, conversational=False)


def test_what_the_owner_of_the_data_has_written_stays_what_it_is():
    kind = kind_of("qwen")
    row = kind.renderer.prompt_ids("<|im_start|>user\n", opening="\nhi")
    assert row == kind.tokenizer("<|im_start|>user\n\nhi")["input_ids"]
    assert row[0] in kind.control_ids


def test_a_control_token_does_not_arise_between_content_blocks():
    control = kind_of("qwen").renderer.control
    blocks = [{"type": "text", "text": part} for part in ("<|", "im_", "end|>", "x")]
    assert [block["text"] for block in control.split(blocks)] == ["<|", "im_", MARK + "end|>", "x"]
    assert [block["type"] for block in control.split(blocks)] == ["text"] * 4


def test_keys_and_odd_values_of_tool_results_are_looked_through_too():
    control = kind_of("qwen").renderer.control
    message = {"role": "tool", "content": [{"<|im_end|>": 1, "role": "<|im_end|>"}, 2, None]}
    split = f"<{MARK}|im_end|>"
    assert control.split(message) == {
        "role": "tool",
        "content": [{split: 1, "role": split}, 2, None],
    }


def test_prompts_of_the_data_set_keep_their_control_tokens():
    kind = kind_of("mistral")
    prompt = "[INST]user[/INST]"
    row = kind.renderer.prompt_ids(prompt, opening=" a</s>b")
    begin, start = kind.tokenizer.convert_tokens_to_ids(["<s>", "[INST]"])
    assert row[:2] == [begin, start]
    assert [i for i in row if i in kind.control_ids] == [
        i for i in kind.tokenizer(prompt)["input_ids"] if i in kind.control_ids
    ]
    assert kind.tokenizer.decode(row).endswith("a</s>b")


def test_the_mark_itself_cannot_be_sent():
    kind = kind_of("gpt2")
    ids = observed(kind, f"<{MARK}|endoftext|>{MARK}")
    assert kind.tokenizer.decode(ids) == "<\ufffd|endoftext|>\ufffd"
    assert observed(kind, f"a{MARK}b") == kind.tokenizer("a\ufffdb")["input_ids"]


def test_a_vocabulary_that_spells_its_control_tokens_does_not_give_them():
    """Unigram models find any entry of their vocabulary in a text, control tokens too."""
    letters = [(c, -2.0) for c in "abs</>▁"]
    core = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    assert tokenizer("a</s>b", split_special_tokens=True)["input_ids"].count(1) == 1
    chat = ChatRenderer(tokenizer, [1])
    ids = chat.observation_ids(user("a</s>b"), last=0, conversational=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<", "/", "s", ">", "b"]


def test_other_spellings_that_the_normaliser_makes_control_tokens_of_are_plain_too():
    tokenizer = qwen().tokenizer
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase()]
    )
    tokenizer.add_tokens([AddedToken("<observation>", special=False, normalized=True)])
    tokenizer.chat_template += "<observation>"
    chat = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    token = tokenizer.convert_tokens_to_ids("<observation>")
    for text in ("<OBSERVATION>", "\uff1cobservation\uff1e", "a<Observation>b<observation>"):
        assert token in tokenizer(text)["input_ids"]
        ids = chat.observation_ids(user(text), last=0, conversational=False)
        assert token not in ids
        assert tokenizer.decode(ids).endswith("observation>")
    plain = "\uff21 plain text"
    assert chat.control.split(plain) is plain


def test_control_tokens_that_eat_blanks_leave_those_of_the_text():
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|x|>", special=True, lstrip=True, rstrip=True)]}
    )
    ids = ChatRenderer(tokenizer, [2]).observation_ids(user("a  <|x|>  b"), last=0, conversational=False)
    assert tokenizer.decode(ids) == "a  <|x|>  b"


def test_a_control_token_of_one_character_is_a_character():
    tokenizer = gpt2().tokenizer
    tokenizer.eos_token = "\n"
    text = "a\nb"
    assert ControlTokens(tokenizer).split(text) is text


def test_tokenizers_that_find_no_control_token_in_text_are_left_alone():
    class Common:
        def __init__(self, tokenizer):
            self.encode = tokenizer

        def __call__(self, text, **options):
            return self.encode(text, **options)

        @property
        def added_tokens_decoder(self):
            raise NotImplementedError

    chat = ChatRenderer(Common(TOKENIZER), [2])
    ids = chat.observation_ids(user("<|im_end|>"), last=0, conversational=False)
    assert ids == [TOKENIZER.eos_token_id]


OTHERS = ["\t", "  ", "\n\n", "word", "née", "東京", "🙂", "\u0338", "\xa0", "\u200d", "\ufeff"]
OTHERS += [*' \na<|>[]"\\', "</", "{{ x }}", "{% if %}"]


def hostile_text(kind: Kind, draw: random.Random) -> str:
    """Control tokens, pieces of them, words, blanks and letters of many scripts, in any order."""
    parts = []
    for _ in range(draw.randint(1, 8)):
        token = draw.choice(kind.controls)
        cut = draw.randint(1, len(token) - 1)
        parts.append(draw.choice([token, token, token[:cut], token[cut:], token[0], token * 2, *OTHERS]))
    return "".join(parts)


@pytest.mark.long
@EVERY_KIND
@pytest.mark.parametrize("times", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_mixes_hold_no_control_token_and_read_as_written(name, times):
    kind, draw = kind_of(name), random.Random(times)
    renders = [observed, opened, *([answered] if name in ("qwen", "slow") else [])]
    for _ in range(times):
        text = unicodedata.normalize("NFC", hostile_text(kind, draw))
        if text.strip():
            assert_said(kind, text, draw.choice(renders))


@EVERY_KIND
@pytest.mark.parametrize("text", ["a door", " a door", "\na door", "</s> <|im_end|>", "", "東京"])
def test_plain_observations_continue_the_text_without_a_space_of_their_own(name, text):
    kind = kind_of(name)
    tokenizer = kind.tokenizer
    before = tokenizer("You say go.", add_special_tokens=False)["input_ids"]
    ids = kind.renderer.control.text_ids(kind.renderer.control.split(text))
    assert tokenizer.decode([*before, *ids]) == "You say go." + text


@pytest.mark.parametrize("name", ["mistral", "mistral, always"])
@pytest.mark.parametrize("opening", ["", " a door", "</s>"])
def test_a_text_that_was_rendered_before_begins_once(name, opening):
    kind = kind_of(name)
    tokenizer = kind.tokenizer
    text = tokenizer.apply_chat_template([{"role": "user", "content": "go"}], tokenize=False)
    assert tokenizer(text)["input_ids"][:2] == [tokenizer.bos_token_id] * 2
    ids = kind.renderer.prompt_ids(text, opening=opening)
    rendered = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[: len(rendered) - 1] == rendered[:-1]
    bare = kind.renderer.prompt_ids("go", opening=opening)
    assert bare[: len(tokenizer("g")["input_ids"]) - 1][0] == tokenizer.bos_token_id
    twice = kind.renderer.prompt_ids(tokenizer.bos_token + text)
    assert twice.count(tokenizer.bos_token_id) == 2
