"""Prompts that explain the protocol of `SearchEnv`, to put before the question."""

_PROTOCOL = (
    "Answer the question below. In each turn, first reason inside <think> and </think>; then do "
    "exactly one thing.\n"
    "- If you lack knowledge, search: <search> query </search>. The best passages come back between "
    "<information> and </information>. You may search again with another query.\n"
    "- Once you know enough, answer: {answer} This ends the task.\n"
    "Never write an <information> block yourself.\n"
)

SEARCH_PROMPT = (
    _PROTOCOL.format(
        answer="<answer> the answer alone, in a few words </answer>, for example "
        "<answer> Beijing </answer>."
    )
    + "\nQuestion: "
)

SEARCH_PROMPT_CHOICES = (
    _PROTOCOL.format(
        answer="<answer> the letter of the right choice </answer>, for example <answer> B </answer>."
    )
    + "\nQuestion: "
)
