"""The model card: TRL's, with results and settings, and no text of rows, episodes or environments."""

import math
import re

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from tests.hub.hub_kit import letters, run
from tests.kit.fakes import CountEnv
from trl_stppo import PPOTrainer, STGRPOTrainer
from trl_stppo.hub.pushing import results


class TalkingEnv(CountEnv):
    """Planted in the docstring."""

    def step(self, action):
        return "planted in an observation", *super().step(action)[1:]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run that has been trained and evaluated."""
    folder = tmp_path_factory.mktemp("evaluated")
    rows = letters(4).add_column("answers", [["planted in a column"]] * 4)
    rows = rows.map(lambda row: {"prompt": [{"role": "system", "content": "planted in a row"}]})
    arguments = {"environment_factory": TalkingEnv, "eval_dataset": {"easy": rows, "hard": rows}}
    trainer = run(folder, arguments=arguments, max_steps=1, variant="s-ppo", trace_episodes=4)
    trainer.train()
    trainer.evaluate()
    return trainer


def test_a_card_has_results_and_settings_and_nothing_of_rows_and_episodes(evaluated):
    evaluated.create_model_card("agent", "owner/name")
    card = ModelCard.load(evaluated.args.output_dir + "/README.md")
    assert "planted" not in card.content
    assert card.data.datasets == "owner/name"
    html = MarkdownIt("commonmark").enable("table").render(card.text)
    headings = [part.split("<")[0] for part in html.split("<h2>")[1:]]
    assert headings[-2:] == ["Results", "Settings"]
    assert "Agent.from_pretrained(" in html
    assert "None" not in card.text
    assert "pipeline" not in card.text
    assert html.count("<table>") == 2
    cells = [line.split("|")[1:5] for line in card.text.splitlines() if line[:3] in ("| e", "| h")]
    assert [name.strip() for name, *_ in cells] == ["easy", "hard"]
    assert all(re.fullmatch(r" [\d.]+ \([\d.]+ to [\d.]+\) ", cell) for _, _, *rest in cells for cell in rest)
    for option in ("variant</code></td>\n<td><code>s-ppo", "seed</code></td>\n<td><code>"):
        assert option in html
    assert "critic_learning_rate" in html
    assert "li2025stppo" in card.text


def test_a_saved_agents_card_has_the_evaluation_after_training(tmp_path):
    arguments = {"environment_factory": CountEnv, "eval_dataset": letters(4)}
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = run(tmp_path / "run", arguments=arguments, **options)
    trainer.evaluate()
    trainer.train()
    card = tmp_path / "run" / "README.md"
    assert "| held-out rows | 0 |" in card.read_text(), "of the model before training"
    trainer.evaluate()
    trainer.save_model()
    assert "| held-out rows | 2 |" in card.read_text()


@pytest.mark.parametrize(
    ("trainer_class", "tag", "absent"),
    [(PPOTrainer, "ppo", "variant"), (STGRPOTrainer, "stgrpo", "critic")],
)
def test_the_other_trainers_have_cards_of_their_own(tmp_path, trainer_class, tag, absent):
    options = {"per_device_train_batch_size": 8, "num_generations": 2, "num_mini_batches": 1}
    run(tmp_path / "run", trainer_class, **options).create_model_card()
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert {tag, "trl", "reinforcement-learning", "multi-turn"} <= set(card.data.tags)
    assert absent not in card.text.split("## Settings")[1].lower()
    assert "## Results" not in card.text


def test_the_last_evaluation_is_the_one_that_counts():
    figures = {"eval_episode/success_rate": math.nan, "eval_episodes": 12345}
    figures |= {"eval_episode/score_low": 0.25, "eval_episode/score_high": 0.75}
    history = [
        {"eval_episode/score": 0.1, "eval_old_episode/score": 0.1, "step": 1},
        {"loss": 1.0, "step": 2},
        {"eval_episode/score": 0.5, **figures, "step": 2},
    ]
    *_, line = results(history).splitlines()
    assert line == "| held-out rows | 2 |  | 0.5 (0.250 to 0.750) |  |  | 12345 |"
    assert results(history).count("\n") == 2
    assert results([{"loss": 1.0, "step": 1}]) == ""
