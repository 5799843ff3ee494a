"""The three public trainers; `training_loop.py` holds their training loop."""

from __future__ import annotations

from ..models.critic import SharedCritic
from ._trl import print_prompt_completions_sample
from .agent_trainer import AgentTrainer
from .evaluation.evaluator import evaluation_settings, undisturbed
from .ppo_config import PPOConfig
from .stgrpo_config import STGRPOConfig
from .stppo_config import STPPOConfig

PPO_CITATION = """\
@article{schulman2017proximal,
    title   = {Proximal Policy Optimization Algorithms},
    author  = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg},
    year    = 2017,
    journal = {arXiv preprint arXiv:1707.06347}
}"""
ST_PPO_CITATION = """\
@article{li2025stppo,
    title   = {{ST-PPO}: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training},
    author  = {Li, Chenliang and Elmahdy, Adel and Boyd, Alex and Wang, Zhongruo and
        Garcia, Alfredo and Bhatia, Parminder and Kass-Hout, Taha and Xiao, Cao and
        Hong, Mingyi},
    year    = 2025,
    journal = {arXiv preprint arXiv:2511.20718}
}"""


class PPOTrainer(AgentTrainer):
    """Proximal policy optimisation for language-model agents, over one or several turns.

    It accepts GRPOTrainer's arguments in the same order. Further arguments, such as arguments of TRL's former
    PPOTrainer, are keyword-only. Reward functions, tools, environments and datasets have GRPOTrainer's
    form; a dataset of pre-tokenised `input_ids` works too.

    Args:
        model: policy, by name or instance. With a PeftModel, or the name of a repository or folder that
            holds an adapter, training continues with that adapter.
        reward_funcs: as in GRPOTrainer. Not needed with an environment that gives rewards.
        args: configuration.
        environment_factory: makes tool environments (GRPOTrainer's contract) or text environments
            (`reset(**row) -> (observation, info)`,
            `step(action) -> (observation, reward, terminated, truncated, info)`), synchronous or not;
            or a dict of factories, from which the rows' `environment` column selects.
        rollout_func: as in GRPOTrainer; its result may also hold `turn_spans`, `turn_rewards`,
            `terminated`, `truncated` and `episode_of`.
        reward_model: one more reward function, a sequence-classification model.
        value_model: separate critic, or the name of a repository or folder: the critic that was
            published there with its policy, else the model itself. Default: with a LoRA policy a
            second adapter on the policy's backbone, else a second backbone with the policy's weights.
        ref_model: reference policy. Default: the policy as it is at the start.
        data_collator: accepted from PPO scripts; padding collators have no effect here.
        turn_reward_funcs: functions, synchronous or asynchronous, that score each turn in its context. They
            are called like reward functions, with one prompt (everything before the turn) and one
            completion (the turn) per turn.
        eval_environment_factory: makes the environments of evaluation, in the form of
            `environment_factory` and of the same kinds. Default: the same factory, other instances.
        agent: a function `(client, row)` that plays an episode by calls of an `openai.AsyncOpenAI`, or of an
            `openai.OpenAI` if it is no coroutine function, and returns a reward (docs/agents.md).

    Raises:
        ValueError: an argument or option that cannot work; the message names the fix.

    Source: Schulman et al. 2017, arXiv:1707.06347; TRL 1.12 for names and reward shaping.
    """

    config_class = PPOConfig
    _tag_names = ["trl", "ppo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "PPO"
    _paper = {  # noqa: RUF012
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": PPO_CITATION,
    }

    def generate_completions(self, sampling: bool = False) -> None:
        """Print episodes of the evaluation (or training) data as a table; with `sampling`, only one batch."""
        self._loop.source.settle()
        with undisturbed(self), evaluation_settings(self):
            rows = self.eval_dataset
            first = next(iter(rows)) if isinstance(rows, dict) else None
            self.model.eval()
            batches = self.get_train_dataloader() if rows is None else self.get_eval_dataloader(first)
            prompts, completions, scores = [], [], []
            for inputs in batches:
                played, scored = self._evaluator.play(inputs)
                prompts += [self.decode(episode.prompt_ids) for episode in played.episodes]
                completions += [self.decode(episode.ids) for episode in played.episodes]
                scores += scored.totals
                if sampling:
                    break
        if self.accelerator.is_main_process:
            step = self.state.global_step
            print_prompt_completions_sample(prompts, completions, {"score": scores}, None, step)

    @property
    def stop_reason(self) -> str | None:
        """Return the reason why the last `train()` ended early, or None."""
        return self._ending.reason

    @property
    def stop_signal(self) -> int | None:
        """Return the number of the signal received during the last `train()`, or None."""
        return self._ending.signal

    @property
    def uses_shared_critic(self) -> bool:
        """Return whether policy and critic share one backbone."""
        return isinstance(self.critic, SharedCritic)


class STPPOTrainer(PPOTrainer):
    """Stabilised off-policy PPO for multi-turn agents.

    It accepts `PPOTrainer`'s arguments and an [`STPPOConfig`]. `variant` chooses between token PPO
    (`"ppo"`), turn-level ratios (`"turn-ppo"`), stabilizers (`"s-ppo"`) and both (`"st-ppo"`).

    Source: Li et al., arXiv:2511.20718v1. We know the published correction of the clipping bias only at
    second hand; `docs/algorithm.md` lists the paper's parts and our own.
    """

    config_class = STPPOConfig
    _tag_names = ["trl", "stppo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-PPO"
    _paper = {  # noqa: RUF012
        "title": "ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training",
        "id": "2511.20718",
        "citation": ST_PPO_CITATION,
    }


class STGRPOTrainer(STPPOTrainer):
    """Policy optimisation without a critic for multi-turn agents, with turn ratios and stabilizers.

    It accepts `STPPOTrainer`'s arguments, without `value_model`, and an [`STGRPOConfig`]; environments,
    turn rewards, guards, checkpoints and engines are the same. An episode's advantage is its score, turn
    rewards included, relative to the other episodes of its prompt; failed episodes are left out.
    `variant="grpo"` is GRPO, `"gspo"` has one ratio per episode, `"rloo"` compares an episode only with
    the group's other episodes, and `"rebn"` compares each turn's return with all returns of the batch.

    Source: Li et al., arXiv:2511.20718v2, where it is called SO-GRPO; RLOO and ReBN: `core`.
    """

    config_class = STGRPOConfig
    has_critic = False
    _tag_names = ["trl", "stgrpo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-GRPO"
