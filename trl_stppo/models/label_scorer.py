"""A process reward model: a causal language model's probability of "yes" against "no" for a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..paths import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEMPLATE = """You judge single steps of an agent.

Task:
{task}

What has happened so far:
{history}

The agent's next step:
{action}

Does this step bring the agent closer to solving the task? Answer with {yes} or {no} alone."""


class LabelTokenScorer:
    """Scores turns by P(yes) / (P(yes) + P(no)) as the first word of a causal model's answer.

    Use it like any function that scores turns: in `turn_reward_funcs`, and as a `verifier`.

    Args:
        model: a causal language model; it stays on its device.
        tokenizer: its tokenizer. With a chat template the question is a user's message.
        template: with the fields `task`, `history`, `action`, `yes` and `no`.
        labels: the two answers, as they are tokenised after the question.
        max_history: characters of the history that are shown, the latest ones.
        batch_size: turns in one forward pass.

    Raises:
        ValueError: both labels begin with the same token, or the template has an unknown field.

    Source: GUI-Shepherd, arXiv:2509.23738; its judge sees the screen instead.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str = TEMPLATE,
        labels: tuple[str, str] = ("yes", "no"),
        max_history: int = 8000,
        batch_size: int = 8,
    ) -> None:
        self.model: Any = model.eval()
        self.tokenizer: Any = tokenizer
        self._template, self._labels, self._batch_size = template, labels, batch_size
        self._max_history = max_history
        self.__name__ = str(model.name_or_path).rstrip("/").split("/")[-1] or "judge"
        first = [self._ids(label)[:1] for label in labels]
        if first[0] == first[1] or [] in first:
            raise ValueError(f"`labels={labels}`: their first tokens {first} must differ.")
        self._yes, self._no = first[0][0], first[1][0]
        try:
            self._question([{"role": "user", "content": ""}], "")
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"`template` has the field {error}; allowed are task, history, action, yes and no."
            ) from error

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: Any = None,
        quantization_config: Any = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> LabelTokenScorer:
        """Load a model and its tokenizer by name, and make a scorer of them.

        Args:
            name: of a repository on the Hub, or a folder.
            tokenizer: default its own.
            device: default the GPU if there is one.
            quantization_config: such as `BitsAndBytesConfig(load_in_4bit=True)`.
            model_init_kwargs: further arguments of the model's `from_pretrained`.
            **options: further arguments of the class.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        check_name("name", name)
        kwargs = {"dtype": "auto", "trust_remote_code": False, **(model_init_kwargs or {})}
        trust = kwargs["trust_remote_code"]
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if quantization_config is not None:
            kwargs |= {"quantization_config": quantization_config, "device_map": {"": device}}
        model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
        if "device_map" not in kwargs:
            model = model.to(device)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        return cls(model, tokenizer, **options)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Return a score between 0 and 1 for each turn.

        Args:
            prompts: messages or text before each turn.
            completions: the turns, as lists of one message or as text.
            **columns: ignored.
        """
        pairs = zip(prompts, map(_text, completions), strict=True)
        rows = [self._ids(self._question(prompt, turn)) for prompt, turn in pairs]
        scores = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            for row, score in zip(batch, self._scores([rows[i] for i in batch]), strict=True):
                scores[row] = score
        return scores

    @staticmethod
    def suits(name: str, **options: Any) -> bool:
        """Return whether the named model generates text and can therefore be a judge.

        Args:
            name: of a repository on the Hub, or a folder.
            **options: of the configuration's `from_pretrained`.
        """
        from transformers import AutoConfig

        named = (AutoConfig.from_pretrained(name, **options).architectures or [""])[0]
        return named.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))

    @torch.inference_mode()
    def _scores(self, rows: list[list[int]]) -> list[float]:
        longest, device = max(map(len, rows)), self.model.get_input_embeddings().weight.device
        # Padded on the right, which a causal model does not attend to; any token works.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows], device=device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=device)
        kept, where = ends.unique(return_inverse=True)
        options = {"use_cache": False, "logits_to_keep": kept}
        logits = self.model(input_ids=ids, attention_mask=mask, **options).logits
        last = logits[torch.arange(len(rows), device=device), where].float()
        return torch.sigmoid(last[:, self._yes] - last[:, self._no]).tolist()

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _question(self, prompt: Any, action: str) -> str:
        task, history = _parts(prompt)
        yes, no = self._labels
        question = self._template.format(
            task=task, history=history[-self._max_history :], action=action, yes=yes, no=no
        )
        if self.tokenizer.chat_template is None:
            return question + "\n"
        messages, options = [{"role": "user", "content": question}], {"tokenize": False}
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)


def _parts(prompt: Any) -> tuple[str, str]:
    """Return the task (the messages before the agent's first turn) and the history (the later messages)."""
    if isinstance(prompt, str):
        return prompt, "(see above)"
    first = next((i for i, m in enumerate(prompt) if m["role"] == "assistant"), len(prompt))
    task = "\n".join(str(message["content"]) for message in prompt[:first])
    lines = [f"{message['role']}: {_line(message)}" for message in prompt[first:]]
    return task, "\n".join(lines) or "(nothing)"


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else _line(completion[0])


def _line(message: dict[str, Any]) -> str:
    calls = [str(call.get("function", call)) for call in message.get("tool_calls") or []]
    return "\n".join([*filter(None, [str(message.get("content") or "")]), *calls])
