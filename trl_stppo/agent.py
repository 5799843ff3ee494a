"""Load a trained policy from the Hub or a folder, and play environments or single turns with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .generation.protocol import Backend
from .generation.sampling import SamplingSettings
from .hub.loading import load_model, load_processor, policy_folder
from .hub.settings import DEFAULT_LENGTH, SAMPLING, AgentSettings
from .rollout.chat import Message
from .rollout.episode import Episode, Limits
from .rollout.images import told, with_pictures
from .rollout.reward_funcs import RewardFunc
from .trainer.loop.rollout import Played, Scored
from .trainer.planning.data import Row
from .trainer.play import Player, Speaker
from .trainer.setup.models import keep_trainable

# Evaluations of a run draw their random numbers from (seed, 1, row, repetition).
EVALUATION = 1


@dataclass(frozen=True)
class AgentEpisode:
    """The result of one episode.

    Attributes:
        messages: the conversation, with the prompt if the prompt was messages.
        turns: text of each turn.
        rewards: the environment's reward of each turn.
        final_reward: the reward at the episode's end (`get_reward`), or None.
        success: whether the task was solved, None if the environment does not return it.
        stop_reason: the reason of the end, as in docs/environments.md.
        error: the environment's error, or None.
        prompt_ids: tokens of the prompt. This and the next fields hold only the first context.
        ids: tokens after the prompt.
        turn_spans: half-open spans of the turns in `ids`.
    """

    messages: list[Message]
    turns: list[str]
    rewards: list[float]
    final_reward: float | None
    success: bool | None
    stop_reason: str
    error: str | None
    prompt_ids: list[int] = field(repr=False)
    ids: list[int] = field(repr=False)
    turn_spans: list[tuple[int, int]] = field(repr=False)

    @property
    def score(self) -> float:
        """Return the sum of the environment's rewards, the final reward included."""
        return sum(self.rewards) + (self.final_reward or 0.0)

    def __str__(self) -> str:
        """Return the conversation as a dialogue, with the reason of its end."""
        lines = [
            f"{m.get('role', '?')}: {m.get('content') or m.get('tool_calls')}" for m in told(self.messages)
        ]
        solved = {True: "solved", False: "failed", None: "not judged"}[self.success]
        return "\n".join([*lines, f"({solved}, score {self.score:g}, {self.stop_reason})"])

    @classmethod
    def of(cls, episode: Episode, decode: Callable[..., str]) -> AgentEpisode:
        """Make an `AgentEpisode` from a finished episode of the rollout engine."""
        assert episode.stop_reason is not None
        before = [] if isinstance(episode.prompt, str) else list(episode.prompt)
        return cls(
            messages=with_pictures([*before, *episode.messages]),
            turns=[decode(ids, skip_special_tokens=True) for ids in episode.turns_of_tokens()],
            rewards=list(episode.turn_rewards),
            final_reward=episode.final_reward,
            success=episode.success,
            stop_reason=episode.stop_reason.value,
            error=episode.error,
            prompt_ids=list(episode.prompt_ids),
            ids=list(episode.ids),
            turn_spans=list(episode.turn_spans),
        )


class Agent:
    """A trained policy that plays episodes with the settings of its run's evaluation.

    Args:
        model: a causal language model, on its device.
        processing_class: its tokenizer, or the processor of a model that reads images.
        settings: limits and sampling; default `AgentSettings()`.
        generation_kwargs: arguments of `generate` besides the sampling in `settings`.
    """

    def __init__(
        self,
        model: Any,
        processing_class: Any,
        settings: AgentSettings | None = None,
        *,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.processing_class = model, processing_class
        self.settings = settings or AgentSettings()
        ends = self.settings.eos_token_ids
        self._speaker = Speaker(model, processing_class, ends, generation_kwargs)
        self.tokenizer, self.reader = self._speaker.tokenizer, self._speaker.reader

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        quantization_config: Any = None,
        device: Any = None,
        dtype: Any = None,
        base_model: str | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Agent:
        """Load a trained policy (a full model or an adapter), its processor, and the settings of its run.

        Code of the repository is neither run nor downloaded, unless `model_init_kwargs` has
        `trust_remote_code=True`.

        Args:
            name_or_folder: a repository on the Hub, or a folder that a trainer has saved.
            revision: branch, tag or commit of the repository.
            token: access token for a repository that is not public.
            quantization_config: for an adapter's base model; default as in training, False for none.
            device: default the GPU, if any.
            dtype: dtype of the weights; default as in training.
            base_model: base model of an adapter, in place of the model that the adapter names.
            model_init_kwargs: further arguments of the model's `from_pretrained`.
            **settings: fields of `AgentSettings` that differ from the run's.

        Raises:
            FileNotFoundError, HubError: there is no such folder; no such repository, or it is out of reach.
            TypeError: a setting that does not exist.
            ValueError: `agent.json` is damaged, or a base model is missing.
        """
        trust = (model_init_kwargs or {}).get("trust_remote_code", False)
        folder = policy_folder(str(name_or_folder), revision, token, code=trust)
        known = replace(AgentSettings.load(folder) or AgentSettings(), **settings)
        given = {"device": device, "dtype": dtype, "base_model": base_model, "token": token}
        given |= {"quantization_config": quantization_config}
        model = load_model(folder, known, model_init_kwargs=model_init_kwargs, **given)
        # Otherwise bitsandbytes repacks 4-bit weights on the CPU and rounds differently.
        keep_trainable(model)
        return cls(model, load_processor(folder, trust_remote_code=trust), known)

    def run(self, env: object, row: Row | None = None, **options: Any) -> AgentEpisode:
        """Play one episode.

        Args:
            env: an environment's class, a factory, or a dict of factories; None for a single turn, or with
                only tools.
            row: columns for `reset`, with `prompt` unless the environment has the task.
            **options: arguments of `run_many`.
        """
        return self.run_many(env, [row or {}], **options)[0]

    def run_many(
        self,
        factory: object,
        rows: Iterable[Row],
        *,
        tools: list[Callable[..., object]] | None = None,
        agent: Callable[..., object] | None = None,
        seed: int = 0,
        greedy: bool = True,
        parallel: int = 32,
        wrap_backend: Callable[[Backend], Backend] | None = None,
    ) -> list[AgentEpisode]:
        """Play one episode per row, `parallel` episodes at a time.

        With the run's seed (`settings.seed`), the episodes are the same as in its evaluation on these rows.

        Args:
            factory: as `env` of `run`.
            rows: a dataset, or a list of dicts.
            tools: functions without an environment.
            agent: a function `(client, row)` in place of an environment, as a trainer takes it.
            seed: seed of the random numbers.
            greedy: take the likeliest token, else sample as in the run's evaluation.
            parallel: episodes at once.
            wrap_backend: function that makes the backend that samples turns (`generation.protocol`) from the
                agent's backend, for example a backend that plays the best of several turns.

        Returns:
            The episodes, in the order of the rows.
        """
        every, episodes = [dict(row) for row in rows], []
        sampling, options = self.sampling(greedy), {"agent": agent, "wrap_backend": wrap_backend}
        with self.player(factory, tools=tools, **options) as player:
            for start in range(0, len(every), parallel):
                part = every[start : start + parallel]
                names = [(start + i, 0) for i in range(len(part))]
                seeds = (seed, EVALUATION)
                episodes += player.play(part, sampling, seeds, names=names).episodes
        return [AgentEpisode.of(episode, self.tokenizer.decode) for episode in episodes]

    def evaluate(
        self,
        factory: object,
        data_sets: Mapping[str, Any],
        reward_funcs: Sequence[RewardFunc] = (),
        *,
        reward_weights: Sequence[float] | None = None,
        missing_eos_penalty: float | None = None,
        seed: int = 0,
        greedy: bool = True,
        parallel: int = 32,
        repetitions: int = 1,
        on_rollout: Callable[[Played, Scored], None] | None = None,
        **options: Any,
    ) -> dict[str, dict[str, float]]:
        """Play held-out rows, divided among all processes, and score them as a trainer's evaluation does.

        Args:
            factory: as `env` of `run`.
            data_sets: rows of each data set, by name.
            reward_funcs: functions in TRL's form, besides the environment's rewards.
            reward_weights: one per function; default 1.
            missing_eos_penalty: reward units, subtracted if an episode's last turn was cut.
            seed: seed of the random numbers.
            greedy: see `run_many`.
            parallel: episodes at once, per process.
            repetitions: episodes per row.
            on_rollout: function that gets each rollout of this process, and its rewards.
            **options: arguments of `player`, such as `tools`, `agent` and `wrap_backend`.

        Returns:
            The metrics of docs/evaluation.md without prefix, by data set, equal on all processes.
        """
        weights = [1.0] * len(reward_funcs) if reward_weights is None else reward_weights
        scoring: dict[str, Any] = {"missing_eos_penalty": missing_eos_penalty}
        scoring |= {"repetitions": repetitions, "parallel": parallel, "on_rollout": on_rollout}
        sampling, seeds = self.sampling(greedy), (seed, EVALUATION)
        with self.player(factory, **options) as player:
            return {
                name: player.evaluate(rows, sampling, seeds, reward_funcs, weights, **scoring)
                for name, rows in data_sets.items()
            }

    def player(self, factory: object, **options: Any) -> Player:
        """Return a player. `factory` is what `run` calls `env`; for `options` see `trainer.play.Player`."""
        kwargs = self.settings.chat_template_kwargs
        return Player(self._speaker, factory, self._limits(), template_kwargs=kwargs, **options)

    def sampling(self, greedy: bool) -> SamplingSettings:
        """Return settings for greedy decoding, or the sampling settings of the run's evaluation."""
        known = {k: v for k, v in self.settings.sampling.items() if k in SAMPLING}
        if greedy:
            known = {"repetition_penalty": known.get("repetition_penalty", 1.0)}
        return SamplingSettings(**{**known, "do_sample": not greedy})

    def _limits(self) -> Limits:
        settings, text_config = self.settings, self.model.config.get_text_config()
        return Limits(
            # Use a default, because a run without environments may have had no limit.
            max_completion_tokens=settings.max_completion_length or DEFAULT_LENGTH,
            max_turns=settings.max_turns,
            max_turn_tokens=settings.max_turn_tokens,
            max_context_tokens=getattr(text_config, "max_position_embeddings", None),
            max_tool_rounds=settings.max_tool_rounds,
            max_images=settings.max_images,
            env_timeout_seconds=settings.env_timeout_seconds,
        )
