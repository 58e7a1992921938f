"""The generation loop on the engine: what ``model.generation`` gives, faster.

Shapes: B prompts, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch

from model.engine.engine import Engine
from model.generation import check_prompts
from model.sampling import Sampling, choose

POLL_STEPS = 8
"""Steps between two looks at which sequences have ended: the host never waits for the newest one."""


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> list[list[int]]:
    """The completion of each prompt, in order; see ``model.generation.generate``. The engine's batch must be empty.

    Tokens stay on the device, and whether all prompts have ended is asked of a step that is long done, so that nothing
    waits for the host. Raises ``InputError`` as ``check_prompts`` does.
    """
    check_prompts(prompts, max_new_tokens, engine.model.args)
    assert engine.running == 0, "the batch is not empty"
    context = min(engine.limits.context, engine.model.args.max_seq_len)
    new = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    chosen = torch.empty(max(new), len(prompts), dtype=torch.long, device=engine.device)
    ended = _Ended(eos, new, engine.device)
    logits = engine.join(prompts, [count - 1 for count in new])
    for number in range(max(new)):
        tokens = engine.model.topology.broadcast(choose(logits, sampling, generator))
        chosen[number] = tokens
        if ended.all_after(number, tokens) or number + 1 == max(new):
            break
        engine.choose(tokens)
        logits = engine.step()
    for row in reversed(range(len(prompts))):
        engine.leave(row)
    columns = chosen[: number + 1].t().tolist()
    return [_cut(column[:count], eos) for column, count in zip(columns, new, strict=True)]


def _cut(tokens: list[int], eos: Collection[int]) -> list[int]:
    """Up to the first EOS."""
    return tokens[: next((place for place, token in enumerate(tokens) if token in eos), len(tokens))]


class _Ended:
    """Which sequences have ended, kept on the device and looked at from time to time."""

    def __init__(self, eos: Collection[int], new: list[int], device: torch.device) -> None:
        self._eos = torch.tensor(sorted(eos), dtype=torch.long, device=device)
        self._new = torch.tensor(new, device=device)
        self._ended = torch.zeros(len(new), dtype=torch.bool, device=device)
        self._seen = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def all_after(self, number: int, tokens: torch.Tensor) -> bool:
        """Whether it is known that every sequence has ended with step ``number`` or before."""
        self._ended |= torch.isin(tokens, self._eos) | (self._new <= number + 1)
        if self._event is None:
            return bool(self._ended.all())
        if number % POLL_STEPS != POLL_STEPS - 1:
            return False
        # Every rank looks at the same steps, or one of them would go on alone. The last look is long done.
        self._event.synchronize()
        if bool(self._seen):
            return True
        self._seen.copy_(self._ended.all(), non_blocking=True)
        self._event.record()
        return False
