"""The generation loop: prompts of token ids in, completions of token ids out.

Shapes: B prompts, L positions of the longest prompt with its completion.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from model.args import ModelArgs
from model.errors import InputError
from model.sampling import Sampling, choose
from model.topology import Topology
from model.transformer import Cache

PAD = -1


class LanguageModel(Protocol):
    """What ``generate`` needs of a model: ``model.transformer.Transformer`` is one."""

    @property
    def args(self) -> ModelArgs:
        """Its sizes: the vocabulary and the longest context are looked at."""

    @property
    def topology(self) -> Topology:
        """The ranks that compute it together."""

    @property
    def device(self) -> torch.device:
        """Where it expects tokens."""

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for ``batch`` sequences of at most ``capacity`` positions."""

    def __call__(self, tokens: torch.Tensor, start: int, cache: Cache) -> torch.Tensor:
        """Logits (B, V) after ``tokens`` (B, S), which stand at positions ``start`` onwards."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    sampling: Sampling,
    generator: torch.Generator,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The completion of each prompt, in order: at most ``max_new_tokens`` ids, ended before its first EOS.

    Every rank calls it with the same arguments and gets the same result: rank 0 chooses, the others are told.
    ``generator`` (``sampling.generator``) goes on from call to call, so that no two batches draw alike.
    A completion also ends where the model's ``max_seq_len`` is reached. ``on_token(prompt, token)`` is called
    for each token of a completion as it comes. Raises ``InputError`` as ``check_prompts`` does.
    """
    check_prompts(prompts, max_new_tokens, model.args)
    starts = [len(prompt) for prompt in prompts]
    ends = [min(start + max_new_tokens, model.args.max_seq_len) for start in starts]
    buffer = _buffer(prompts, max(ends))  # B, L on the host
    cache = model.new_cache(len(prompts), max(ends))
    completions: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    seen = 0
    for position in range(min(starts), max(ends)):
        logits = model(buffer[:, seen:position].to(model.device), seen, cache)
        chosen = model.topology.broadcast(choose(logits, sampling, generator)).cpu()
        given = buffer[:, position] != PAD
        buffer[:, position] = torch.where(given, buffer[:, position], chosen)
        for prompt in sorted(unfinished):
            if position < starts[prompt]:
                continue
            token = int(buffer[prompt, position])
            if token not in eos:
                completions[prompt].append(token)
                if on_token is not None:
                    on_token(prompt, token)
            if token in eos or position + 1 == ends[prompt]:
                unfinished.discard(prompt)
        if not unfinished:
            break
        seen = position
    return completions


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, args: ModelArgs) -> None:
    """Raise ``InputError``, a line for each prompt that cannot be completed, numbered from 1."""
    problems = [f"max_new_tokens {max_new_tokens} is below 1"] if max_new_tokens < 1 else []
    problems += [] if prompts else ["no prompt was given"]
    for number, prompt in enumerate(prompts, start=1):
        strange = [token for token in prompt if not 0 <= token < args.vocab_size]
        if not prompt:
            problems.append(f"prompt {number}: is empty")
        elif strange:
            problems.append(
                f"prompt {number}: token id {strange[0]} is outside the model's vocabulary of {args.vocab_size}; "
                "the tokenizer belongs to another model"
            )
        elif len(prompt) >= args.max_seq_len:
            problems.append(
                f"prompt {number}: its {len(prompt)} tokens leave no room in the model's context of "
                f"{args.max_seq_len}; shorten it"
            )
    if problems:
        raise InputError(problems)


def _buffer(prompts: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """Prompts as rows of int64 (B, L), padded at their ends."""
    buffer = torch.full((len(prompts), length), PAD)
    for row, prompt in enumerate(prompts):
        buffer[row, : len(prompt)] = torch.tensor(prompt)
    return buffer
