"""No padding is computed: what goes through policy and critic, and that it changes nothing."""

import pytest
import torch
from peft import LoraConfig
from trl.kernels import chunked_logprob

from tests.kit.fakes import char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import assert_same, logged, scripted_trainer, train
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.trainer._trl import TORCH_TILE_TOKENS, small_tiles
from trl_stppo.trainer.agent_trainer import AgentTrainer
from trl_stppo.trainer.loop import forward
from trl_stppo.trainer.training_loop import TrainingLoop

LENGTHS = [60, 7, 30, 8, 9, 33, 10, 58]
INF = float("inf")


def play_ragged(prompts, trainer=None):
    """Episodes of two turns, of very different lengths; each prompt is a third of its episode."""
    output = {key: [] for key in ("prompt_ids", "completion_ids", "turn_spans", "turn_rewards")}
    for prompt in prompts:
        number = int(prompt)
        length = LENGTHS[number % len(LENGTHS)]
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 90, (length,), generator=draw).tolist()
        own = length - length // 3
        output["prompt_ids"].append(ids[: length // 3])
        output["completion_ids"].append(ids[length // 3 :])
        output["turn_spans"].append([(0, own // 2), (own // 2, own)])
        output["turn_rewards"].append(torch.randn(2, generator=draw).tolist())
    return {**output, "logprobs": None}


class Counted(STPPOTrainer):
    """Counts the tokens of every forward pass of the update, padding included."""

    def _count(self, name, ids):
        if torch.is_grad_enabled():
            counts = self.__dict__.setdefault("counts", {"policy": 0, "critic": 0})
            counts[name] += ids.numel()

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        upstream = super(AgentTrainer, self)._get_per_token_logps_and_entropies

        def counted(model, ids, *rest, **flags):
            self._count("policy", ids)
            return upstream(model, ids, *rest, **flags)

        return self._forward.logprobs(counted, *args, **kwargs)

    def _build_models(self, run):
        super()._build_models(run)
        original = self._forward.parts

        def parts(*args):
            found = original(*args)
            for part in found:
                self._count("critic", part.input_ids)
            return found

        self._forward.parts = parts


def ragged(folder, kind, **options):
    tokenizer = char_tokenizer()
    models = {
        "shared": {"peft_config": LoraConfig(r=4, target_modules="all-linear")},
        "separate": {"value_model": tiny_value_model(tokenizer)},
    }[kind]
    trainer, recorder = scripted_trainer(
        folder, trainer_class=options.pop("trainer_class", Counted), model=tiny_policy(tokenizer),
        variant="turn-ppo", per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_completion_length=64, staleness=0.0, rollout_func=play_ragged, **models, **options,
    )  # fmt: skip
    trainer.train()
    return trainer, recorder


@pytest.fixture(autouse=True)
def no_overhead(monkeypatch):
    """Tiny models on tiny rows: a pass costs nothing beside them."""
    monkeypatch.setitem(forward.PASS_OVERHEAD, "cpu", 1.0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_update_computes_hardly_more_than_the_episodes_tokens(kind, tmp_path, monkeypatch):
    trainer, _ = ragged(tmp_path / "parts", kind)
    real = sum(LENGTHS)
    policy, critic = trainer.counts["policy"], trainer.counts["critic"] - trainer.counts["policy"]
    assert real <= policy <= 1.05 * real
    assert real <= critic <= 1.05 * real
    monkeypatch.setitem(forward.PASS_OVERHEAD, "cpu", INF)
    padded, _ = ragged(tmp_path / "padded", kind)
    assert padded.counts["policy"] > 1.3 * real, "the case should be interesting"


def test_values_are_computed_in_bounded_chunks(tmp_path):
    rows = []

    class Loop(TrainingLoop):
        def rollout_values(self, batch):
            parts = self.forward.parts

            def watched(*args):
                found = parts(*args)
                rows.extend(len(part.rows) for part in found)
                return found

            self.forward.parts = watched
            try:
                return super().rollout_values(batch)
            finally:
                self.forward.parts = parts

    class Watched(Counted):
        loop_class = Loop

    ragged(tmp_path, "shared", trainer_class=Watched, local_rollout_forward_batch_size=3)
    assert sum(rows) == len(LENGTHS)
    assert max(rows) <= 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "multiple"),
    quick(
        [("ppo", None), ("turn-ppo", None), ("s-ppo", None), ("st-ppo", None), ("st-ppo", 8)],
        ("st-ppo", 8),
    ),
)
def test_grouping_changes_the_update_by_rounding_only(variant, multiple, tmp_path, monkeypatch):
    """float64, absolute positions, rows split into groups against rows padded together."""
    runs = []
    for overhead in (1.0, 4.0, INF):
        monkeypatch.setitem(forward.PASS_OVERHEAD, "cpu", overhead)
        trainer, recorder = train(
            tmp_path / str(overhead), variant=variant, pad_to_multiple_of=multiple,
            num_ppo_epochs=2, max_steps=2, beta=0.1, entropy_coef=0.05,
        )  # fmt: skip
        runs.append((logged(trainer, "loss"), recorder))
    for losses, recorder in runs[1:]:
        # The losses are summed in float32.
        assert losses == pytest.approx(runs[0][0], rel=1e-6, abs=1e-6)
        for step in range(2):
            for part in ("policy", "critic"):
                assert_same(recorder.moved(part, step), runs[0][1].moved(part, step), 1e-9)


def test_old_logprobs_and_values_are_those_of_single_episodes(tmp_path):
    """Against one forward pass per episode, without any padding, in a loop."""
    trainer, recorder = train(tmp_path, learning_rate=0.0, critic_learning_rate=0.0, staleness=0.0)
    batch = recorder.batches[0]
    critic = trainer.critic
    for b in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][b][batch["prompt_mask"][b].bool()]
        completion = batch["completion_ids"][b][batch["completion_mask"][b].bool()]
        ids = torch.cat([prompt, completion])[None]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(1, ids[0, 1:, None]).squeeze(1)[len(prompt) - 1 :]
            values = critic.score(critic.hidden_states(ids, torch.ones_like(ids)))[0]
        count = len(completion)
        torch.testing.assert_close(batch["old_per_token_logps"][b, :count], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            batch["values"][b, :count], values[len(prompt) - 1 : -1], rtol=0, atol=1e-12
        )


def test_tiles_are_small_where_trl_folds_them_in_torch_and_restored_afterwards(tmp_path):
    tokens = []

    class Watched(Counted):
        def _compute_loss(self, model, inputs):
            tokens.append(chunked_logprob.TOKEN_CHUNK_SIZE)
            return super()._compute_loss(model, inputs)

    before = chunked_logprob.TOKEN_CHUNK_SIZE
    ragged(tmp_path, "shared", trainer_class=Watched)
    assert set(tokens) == {TORCH_TILE_TOKENS}
    assert before == chunked_logprob.TOKEN_CHUNK_SIZE
    with small_tiles(torch.device("cuda")):
        on_gpu = before if chunked_logprob._use_triton(torch.device("cuda")) else TORCH_TILE_TOKENS
        assert on_gpu == chunked_logprob.TOKEN_CHUNK_SIZE
