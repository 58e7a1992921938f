"""Text in and out: the checkpoint's tokenizer and chat template, its EOS tokens, files of prompts.

Only rank 0 needs any of it. transformers is imported where it is used, since that takes seconds.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.source import read_json
from model.errors import InputError

Messages = list[dict[str, str]]
"""A conversation: ``{"role": "user" | "assistant" | "system", "content": text}``, oldest first."""


def from_user(text: str) -> Messages:
    """A conversation of one line."""
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer with its chat template, and the token ids that end a reply."""

    tokens: Any
    eos: frozenset[int]

    @classmethod
    def open(cls, checkpoint: Path, *, trust_remote_code: bool = False) -> "Tokenizer":
        """The tokenizer in ``checkpoint``.

        Raises ``InputError`` where it cannot be loaded, has no chat template or where no EOS token is named.
        """
        tokens = load_tokens(checkpoint, trust_remote_code=trust_remote_code)
        if not tokens.chat_template:
            raise InputError(f"{checkpoint}: its tokenizer has no chat template; copy chat_template.jinja into it")
        eos = eos_ids(checkpoint) or frozenset({tokens.eos_token_id} - {None})
        if not eos:
            raise InputError(
                f"{checkpoint}: names no EOS token, so that no reply would end; state eos_token_id in config.json"
            )
        return cls(tokens, eos)

    def encode(self, messages: Messages) -> list[int]:
        """Token ids of the conversation, up to where the reply begins.

        Raises ``InputError`` where the chat template cannot be used for it.
        """
        try:
            ids: list[int] = self.tokens.apply_chat_template(
                messages,
                add_generation_prompt=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},  # a prompt that is too long is refused by ``check_prompts``
            )
        except Exception as error:  # a template is a program, which may refuse (a role, an order) or fail as it likes
            raise InputError(f"the chat template cannot be used for it: {_reason(error)}") from error
        return ids

    def encode_all(self, conversations: Iterable[Messages]) -> list[list[int]]:
        """``encode`` for each. Raises ``InputError`` with a line for each that fails, numbered from 1."""
        encoded: list[list[int]] = []
        problems: list[str] = []
        for number, messages in enumerate(conversations, start=1):
            try:
                encoded.append(self.encode(messages))
            except InputError as error:
                problems += [f"prompt {number}: {problem}" for problem in error.problems]
        if problems:
            raise InputError(problems)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens."""
        text: str = self.tokens.decode(ids, skip_special_tokens=True)
        return text


def load_tokens(checkpoint: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of transformers in ``checkpoint``. Raises ``InputError`` where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare ones, and a tokenizer that is code whatever it likes
        raise InputError(f"{checkpoint}: its tokenizer cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What ``error`` says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def eos_ids(checkpoint: Path) -> frozenset[int]:
    """Token ids that end a reply: ``eos_token_id``, a number or a list, of the generation config, else the config.

    Raises ``InputError`` naming a file that holds something else.
    """
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not ids or not all(type(token) is int and token >= 0 for token in ids):
                raise InputError(f"{path}: eos_token_id = {value!r} is neither a token id nor a list of some")
            return frozenset(ids)
    return frozenset()


def read_prompts(path: Path) -> list[Messages]:
    """The conversations of a file, in order: one a line.

    A line of a ``.jsonl`` file is an object with ``prompt`` (text) or ``messages``; a line of any other file is a
    prompt as it stands. Empty lines are passed over. Raises ``InputError`` naming the lines that cannot be used.
    """
    try:
        # Not splitlines, which also splits where a text has a form feed or one of Unicode's separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"{path}: holds no prompt")
    return _json_prompts(path, numbered) if path.suffix == ".jsonl" else [from_user(line) for _, line in numbered]


def _json_prompts(path: Path, numbered: Iterable[tuple[int, str]]) -> list[Messages]:
    conversations: list[Messages] = []
    problems: list[str] = []
    for number, line in numbered:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{number}: is not JSON: {error}")
            continue
        if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
            conversations.append(from_user(entry["prompt"]))
        elif isinstance(entry, dict) and _are_messages(entry.get("messages")):
            conversations.append(entry["messages"])
        else:
            problems.append(
                f'{path}:{number}: has neither "prompt", a text, nor "messages", a list of role and content'
            )
    if problems:
        raise InputError(problems)
    return conversations


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
