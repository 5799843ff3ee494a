"""Messages to token ids for a conversation that only ever grows at its end.

Sampled ids are kept as sampled. What the environment says is tokenised once, as the suffix that the
chat template puts after an assistant message, so nothing is decoded and encoded again.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class ChatRenderer:
    """Renders prompts and observations for one tokenizer and template.

    Args:
        tokenizer: has a chat template if prompts are conversations.
        eos_token_ids: ids that end a turn.
        chat_template: overrides the tokenizer's own.
        template_kwargs: passed on to `apply_chat_template`.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: list[int],
        *,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = set(eos_token_ids)
        self._template = {"chat_template": chat_template, **(template_kwargs or {})}

    def prompt_ids(self, prompt: list[Message] | str) -> list[int]:
        """Token ids of a prompt, ready for the model's turn."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        return self._render(prompt, add_generation_prompt=True)

    def observation_ids(self, text: str, *, conversational: bool, turn_ended: bool) -> list[int]:
        """Token ids between two turns.

        Args:
            text: what the environment said.
            conversational: as a user message of the template; otherwise as bare text.
            turn_ended: whether the turn before ended with an end-of-turn token of its own. If not
                (it was cut), the template's one comes first, as part of the observation.
        """
        if not conversational:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        before = self._render(dummy, add_generation_prompt=False)
        after = self._render(
            [*dummy, {"role": "user", "content": text}], add_generation_prompt=True
        )
        end = self._end_of_turn(before)
        cut = end + 1 if turn_ended else end
        if after[:cut] != before[:cut]:
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path or type(self.tokenizer).__name__!r} "
                f"renders earlier messages differently once later ones follow, so an episode cannot "
                f"grow by appending. Set a prefix-preserving `chat_template` on the tokenizer."
            )
        return after[cut:]

    def decode_action(self, ids: list[int]) -> str:
        """The text of one turn, as the environment sees it."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _end_of_turn(self, ids: list[int]) -> int:
        for position in range(len(ids) - 1, -1, -1):
            if ids[position] in self.eos_token_ids:
                return position
        raise ValueError(
            f"The chat template does not end an assistant message with any of the end-of-turn ids "
            f"{sorted(self.eos_token_ids)}, so the end of a turn cannot be recognised. Set the "
            f"tokenizer's eos_token (or generation_config.eos_token_id) to the template's "
            f"end-of-turn token."
        )

    def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **self._template,
            )
        )


def with_observation(prompt: list[Message] | str, observation: str) -> list[Message] | str:
    """Append an environment's opening words to the last message, as GRPOTrainer does."""
    if not observation:
        return prompt
    if isinstance(prompt, str):
        return prompt + observation
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": last["content"] + observation}]
