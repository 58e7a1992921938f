"""How fast a checkpoint generates: tokens a second of prefill and of decoding, at several batch sizes.

Shapes: B sequences, P tokens of each prompt, N new tokens of each.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.errors import InputError
from model.generation import LanguageModel

PROMPT, NEW = 128, 32


@dataclass(frozen=True)
class Speed:
    """Tokens a second of all sequences of a batch together; ``prefill`` of prompts, ``decode`` of what follows."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_speed(model: LanguageModel, ids: Sequence[int], batches: Sequence[int]) -> tuple[Speed, ...]:
    """The speed at each of ``batches``, on prompts from the text ``ids``, whose routing is that of real use.

    Each is measured twice, and the second counts: the first compiles kernels and fills the allocator.
    """
    prompt, new = prompt_and_new(model.args.max_seq_len)
    speeds = []
    for batch in batches:
        tokens = prompts(ids, batch, prompt).to(model.device)
        _once(model, tokens, new)
        prefill_s, decode_s = _once(model, tokens, new)
        speeds.append(Speed(batch, prompt, new, batch * prompt / prefill_s, batch * new / decode_s))
    return tuple(speeds)


def prompt_and_new(context: int) -> tuple[int, int]:
    """Tokens of a prompt and new ones after it: 128 and 32, less where the context is shorter.

    Raises ``InputError`` where not even one of each fits.
    """
    if context < 2:
        raise InputError(f"the model's context of {context} is too short for a prompt and a new token")
    new = min(NEW, max(1, context // 4))
    return min(PROMPT, context - new), new


def prompts(ids: Sequence[int], batch: int, length: int) -> torch.Tensor:
    """Int64 (batch, length): one passage after the other, from the beginning again where the text ends."""
    endless = torch.tensor(ids).repeat(-(-batch * length // len(ids)))
    return endless[: batch * length].view(batch, length)


def _once(model: LanguageModel, tokens: torch.Tensor, new: int) -> tuple[float, float]:
    """Seconds of the prompts (B, P), and of ``new`` greedy steps after them."""
    prompt = tokens.shape[1]
    cache = model.new_cache(len(tokens), prompt + new)
    began = _now(model)
    logits = model(tokens, 0, cache)
    prefilled = _now(model)
    for position in range(prompt, prompt + new):
        chosen = model.topology.broadcast(logits.argmax(dim=-1))
        logits = model(chosen[:, None], position, cache)
    return prefilled - began, _now(model) - prefilled


def _now(model: LanguageModel) -> float:
    """The time, once the device has done all that it was told."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
