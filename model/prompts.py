"""Text in and out: the checkpoint's tokenizer and chat template, its EOS tokens, files of prompts.

Only rank 0 needs any of it. transformers is imported where it is used, since that takes seconds.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        """The tokenizer in ``checkpoint``. Raises ``InputError`` where it cannot be loaded or has no template."""
        from transformers import AutoTokenizer

        try:
            tokens = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{checkpoint}: its tokenizer cannot be loaded: {reason}") from error
        if not tokens.chat_template:
            raise InputError(f"{checkpoint}: its tokenizer has no chat template; copy chat_template.jinja into it")
        return cls(tokens, eos_ids(checkpoint) or frozenset([tokens.eos_token_id]))

    def encode(self, messages: Messages) -> list[int]:
        """Token ids of the conversation, up to where the reply begins."""
        ids: list[int] = self.tokens.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # a prompt that is too long is refused by ``check_prompts``
        )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens."""
        text: str = self.tokens.decode(ids, skip_special_tokens=True)
        return text


def eos_ids(checkpoint: Path) -> frozenset[int]:
    """Token ids that end a reply: ``eos_token_id``, a number or a list, of the generation config, else the config."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def read_prompts(path: Path) -> list[Messages]:
    """The conversations of a file, in order: one a line.

    A line of a ``.jsonl`` file is an object with ``prompt`` (text) or ``messages``; a line of any other file is a
    prompt as it stands. Empty lines are passed over. Raises ``InputError`` naming the lines that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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
