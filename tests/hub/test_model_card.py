"""The model card: what it says, and that words of others stay words."""

import dataclasses
import importlib.util
import math

import pytest
from huggingface_hub import ModelCard, ModelCardData
from markdown_it import MarkdownIt
from peft import LoraConfig

from tests.hub.hub_kit import REPO, letters, run
from tests.kit.fakes import CountEnv
from trl_stppo import PPOTrainer, STGRPOTrainer
from trl_stppo.hub import card as cards
from trl_stppo.hub.description import Description, Environment
from trl_stppo.hub.markdown import code, escaped, fenced
from trl_stppo.hub.results import last_evaluations, results_table

HOSTILE = (
    "# Heading\n\n<script>alert(1)</script> <img src=x onerror=alert(1)> [x](javascript:alert(1)) "
    "![i](https://evil.example/i.png) `code` ``` | cell | $x$ ~~~ https://evil.example @someone "
    "\u202etxet\u202c \x00\x1b[31m ---\n---\ntags: [evil]\n"
)


def rendered(text: str) -> str:
    linkify = importlib.util.find_spec("linkify_it") is not None  # bare addresses, as the Hub does
    reader = MarkdownIt("commonmark", {"html": True, "linkify": linkify}).enable("table")
    return (reader.enable("linkify") if linkify else reader).render(text)


def card_of(trainer) -> ModelCard:
    trainer.create_model_card()
    return ModelCard.load(f"{trainer.args.output_dir}/README.md")


class HostileEnv(CountEnv):
    __doc__ = HOSTILE


HostileEnv.__name__ = HostileEnv.__qualname__ = "Evil`](x) <b>"


@pytest.mark.parametrize(
    ("form", "before"), [(escaped, ""), (code, "- "), (escaped, "1. "), (code, ""), (escaped, "> ")]
)
def test_no_words_become_markup(form, before):
    allowed = {"<p>", "</p>", "<span>", "</span>", "<code>", "</code>"}
    html = rendered(form(before + HOSTILE))
    tags = {tag if ">" in tag else tag + ">" for tag in _tags(html)}
    assert tags <= allowed, html
    for word in ("Heading", "alert(1)", "evil.example", "someone"):
        assert word in html
    assert "\u202e" not in html
    assert "\x00" not in html


def _tags(html: str) -> list[str]:
    return ["<" + part.split(">")[0] + ">" for part in html.split("<")[1:]]


def test_a_block_of_code_ends_where_it_should():
    html = rendered(fenced("a\n```\n</code><b>x</b>\n~~~~\n````", "text") + "\n\nafter")
    assert html.count("<pre>") == 1
    assert "<b>" not in html
    assert "<p>after</p>" in html


@pytest.mark.parametrize("name", [None, "a/folder/of/rows", "owner/name"])
def test_rows_stay_here_whatever_name_the_data_has(tmp_path, name):
    rows = letters()
    rows = rows.add_column("answers", [["a secret"]] * len(rows))
    trainer = run(tmp_path / "run", arguments={"train_dataset": rows}, hub_model_id=None)
    trainer.create_model_card(dataset_name=str(tmp_path) if name == "a/folder/of/rows" else name)
    card = ModelCard((tmp_path / "run" / "README.md").read_text())
    assert "a secret" not in card.text
    assert "say 0" not in card.text
    assert card.data.datasets == (["owner/name"] if name == "owner/name" else None)


class OfferingEnv(CountEnv):
    """Offers rows of its own."""

    @classmethod
    def datasets(cls):
        return {"alphabet": lambda split: letters()}


def test_a_card_survives_names_docstrings_and_rows_of_others(tmp_path):
    folder, system = tmp_path / "odd `]( <b> name", {"role": "system", "content": HOSTILE}
    rows = letters().map(lambda row: {"prompt": [system, *row["prompt"]]})
    arguments = {"environment_factory": HostileEnv, "train_dataset": rows}
    trainer = run(folder, arguments=arguments, hub_model_id=None)
    trainer.create_model_card(model_name=HOSTILE, dataset_name=HOSTILE, tags=["a\nb: c"])
    card = ModelCard((folder / "README.md").read_text())
    assert "evil" not in card.data.tags
    assert "a b: c" in card.data.tags
    html = rendered(card.text)
    for tag in ("<script", "<img", "<b>", "onerror=alert(1)>", 'href="javascript'):
        assert tag not in html
    headings = [part.split("<")[0] for part in html.split("<h2>")[1:]]
    assert headings == ["Agent", "Training procedure", "Citations"]
    links = {part.split('"')[0] for part in html.split('href="')[1:]}
    assert not [link for link in links if "evil" in link]


@pytest.mark.parametrize(
    ("trainer_class", "tag", "absent"),
    [(PPOTrainer, "ppo", "variant"), (STGRPOTrainer, "stgrpo", "critic")],
)
def test_the_other_trainers_have_cards_of_their_own(tmp_path, trainer_class, tag, absent):
    options = {"per_device_train_batch_size": 8, "num_generations": 2, "num_mini_batches": 1}
    card = card_of(run(tmp_path / "run", trainer_class, **options))
    assert {tag, "trl", "reinforcement-learning", "multi-turn"} <= set(card.data.tags)
    assert absent not in card.text.split("## Citations")[0].lower()


@pytest.mark.parametrize(("text", "written"), [
    ("My words.\n", False),
    ("---\nlicense: mit\ntags: [mine]\n---\nMy words.\n", False),
    ("---\ntags: [broken\n---\nMy words.\n", False),
    ("---\ntags:\n- generated_from_trainer\n---\nOf an earlier run.\n", True),
])  # fmt: skip
def test_only_a_trainers_card_is_overwritten(hub, tmp_path, caplog, text, written):
    trainer = run(tmp_path / "run")
    path = tmp_path / "run" / "README.md"
    path.write_text(text)
    trainer.save_model()
    trainer.push_to_hub()
    assert (path.read_text() == text) is not written
    assert hub.repos[REPO].files["README.md"].decode() == path.read_text()
    assert caplog.text.count(f"`{path}` has no tag") == (not written)


def test_an_adapters_card_goes_on_being_the_runs(hub, tmp_path, caplog):
    """PEFT takes the tags out of every card that it finds where it saves."""
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = run(tmp_path / "run", arguments=lora, **steps)
    path = tmp_path / "run" / "README.md"
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))  # the usual last line of a script
    assert "has no tag" not in caplog.text
    assert cards.GENERATED in ModelCard.load(path).data.tags
    trainer.evaluate(letters(2))  # a later result gets into it
    trainer.save_model(str(tmp_path / "run"))
    card = ModelCard.load(path)
    assert card.data.eval_results
    other = tmp_path / "other" / "README.md"  # where no new one is written
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    trainer.save_model(str(other.parent))
    assert other.read_bytes() == path.read_bytes()
    trainer.push_to_hub()
    sent = ModelCard(hub.repos[REPO].files["README.md"].decode())
    assert {cards.GENERATED, "lora", "trl"} <= set(sent.data.tags)


def test_a_form_counts_as_no_card_until_somebody_fills_it_in(tmp_path):
    path = tmp_path / "README.md"
    form = str(ModelCard.from_template(ModelCardData(library_name="peft")))
    form += "\n### Framework versions\n\n- PEFT 0.21.2"
    path.write_text(form)
    assert cards.may_be_written(tmp_path)
    mine = form.replace("[More Information Needed]", "My words.", 1)
    for text in (mine, "---\nlicense: mit\n---\n# Model Card for Model ID\n\nMy words.\n"):
        path.write_text(text)
        assert not cards.may_be_written(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_text("half"), lambda path: path.unlink()]
)
def test_a_card_gets_its_words_back_when_saving_fails(damage, tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text("My words.\n")

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    def save():
        with cards.kept(tmp_path):
            damage(path)
            monkeypatch.setattr("builtins.open", full)
            monkeypatch.setattr("io.open", full)
            full()

    with pytest.raises(OSError, match="No space left"):
        save()
    monkeypatch.undo()
    assert path.read_text() == "My words.\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_last_evaluation_is_the_one_that_counts():
    history = [
        {"eval_episode/score": 0.1, "step": 1},
        {"loss": 1.0, "step": 2},
        {"eval_episode/score": 0.5, "eval_episode/success_rate": math.nan, "step": 2},
    ]
    found = last_evaluations(history)
    assert [(e.step, e.name) for e in found] == [(2, None)]
    assert "| score | 0.500 |" in results_table(found)
    assert "success" not in results_table(found)
    assert last_evaluations([{"loss": 1.0}]) == []


@pytest.mark.parametrize(
    ("train", "test", "offers"),
    [("alphabet", "alphabet", True), ("alphabet", "other", False), ("other", "other", False)],
)
def test_an_episode_is_shown_if_the_environment_itself_offers_its_row(
    tmp_path, train, test, offers
):
    rows, held = letters(), letters(3)
    rows.info.dataset_name, held.info.dataset_name = train, test
    arguments = {"train_dataset": rows, "eval_dataset": held, "environment_factory": OfferingEnv}
    trainer = run(tmp_path / "run", arguments=arguments, hub_model_id=None, max_steps=1)
    trainer.train()
    trainer.evaluate()
    text = card_of(trainer).text
    assert ("### An episode" in text) == ("say 0" in text) == offers


def test_a_card_describes_the_run(tmp_path):
    held = {"easy": letters(2), "hard": letters(3)}
    options = {"max_steps": 1, "variant": "s-ppo"}
    trainer = run(tmp_path / "run", arguments={"eval_dataset": held}, **options)
    trainer.train()
    trainer.evaluate()
    card = card_of(trainer)
    for words in (
        *("| `variant` | `s-ppo` |", "| `critic_learning_rate` | `0.01` |", "`critic/` holds the"),
        *("`CountEnv`: Pays for how often", "li2025stppo", "- trl-stppo: ", "- TRL: "),
        *("from tests.kit.fakes import CountEnv", "agent.run(CountEnv, row)", "|  | easy | hard |"),
    ):
        assert words in card.text, words
    assert "time machine" not in card.text  # TRL's stock example
    assert "None" not in card.text
    assert {r.dataset_name for r in card.data.eval_results} == {"easy", "hard"}
    assert card.data.pipeline_tag == "text-generation"
    assert "licence" not in card.data


def test_an_environment_that_cannot_be_imported_has_a_stand_in():
    facts = dict.fromkeys(field.name for field in dataclasses.fields(Description))
    facts |= {"critic": "none", "dtype": "float32", "tools": (), "settings": {}, "method": "PPO"}
    env = Environment("a", "text", "f.<locals>.Env", "m")
    text = cards.section(Description(**facts | {"environments": (env,)}), "me/x", "", None)
    assert "agent.run({'a': YourEnvironment}, row)" in text
    assert "import f" not in text


def test_a_failing_card_ends_no_run(tmp_path, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no card today")

    trainer = run(tmp_path / "run")
    monkeypatch.setattr(cards, "improve", broken)
    trainer.create_model_card()
    assert "no card today" in caplog.text
