"""A checkpoint as a model of lm-evaluation-harness (the extra ``eval``): the three requests that its tasks make.

Rank 0 alone runs the harness; the other ranks compute along with it (``model.evaluation.teamwork``). Likelihoods of
whole texts go through the windows of ``model.evaluation``, so that the harness's perplexity is this project's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from model.errors import InputError
from model.evaluation.progress import shown_progress
from model.evaluation.teamwork import Completing, Rolling, Scoring, Work
from model.sampling import Sampling
from model.transformer import Transformer

NEW_TOKENS = 256
"""Longest completion where a task names none."""


class ShardflowLM(TemplateLM):  # type: ignore[misc]
    """The harness's view of ``model`` on rank 0, with transformers' tokenizer ``tokens``; ``close`` it at the end.

    ``eos`` end a completion; ``batch`` requests are computed at once. Raises ``InputError`` where the tokenizer names
    no BOS token, with which every text begins.
    """

    def __init__(self, model: Transformer, tokens: Any, eos: frozenset[int], batch: int = 4) -> None:
        super().__init__()
        if tokens.bos_token_id is None:
            raise InputError("the tokenizer names no BOS token, with which an evaluated text begins")
        self.model, self.tokenizer, self.eos, self.batch = model, tokens, eos, batch

    def close(self) -> None:
        """Let the other ranks go."""
        self.model.topology.broadcast_object(None)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self.eos)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text's first one."""
        return int(self.tokenizer.bos_token_id)

    @property
    def max_length(self) -> int:
        """The longest context."""
        return self.model.args.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps tokenised requests under."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after one BOS unless ``add_special_tokens`` is False or the text has it, as a chat's does."""
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False, verbose=False)
        whole = add_special_tokens is False or ids[:1] == [self.prefix_token_id]
        return ids if whole else [self.prefix_token_id, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Contexts that are too long lose their beginning."""
        sequences, scored = [], []
        for (_context, continuation), before, after in requests:
            if not 0 < len(after) <= self.max_length:
                raise InputError(f"a continuation of {len(after)} tokens cannot be scored: {continuation[:60]!r}")
            sequences.append([*before, *after][-(self.max_length + 1) :])
            scored.append(len(after))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(sequences)
        longest_first = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        with shown_progress("loglikelihood", len(sequences), "requests", quiet=disable_tqdm) as advance:
            for some in _batches(longest_first, self.batch):
                work = Scoring([sequences[i] for i in some], [scored[i] for i in some])
                for i, result in zip(some, self._together(work), strict=True):
                    results[i] = result
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
                advance(len(some), "")
        return results

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, whatever its length, in nats."""
        results = []
        with shown_progress("texts", len(requests), "texts", quiet=disable_tqdm) as advance:
            for request in requests:
                (text,) = request.args
                results.append(self._together(Rolling(self.tok_encode(text), self.batch)))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
                advance(1, "")
        return results

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The completion of each context, cut before the first of its stop texts; greedy unless a task samples."""
        results = [""] * len(requests)
        wishes = [_Wish.of(request.args[1]) for request in requests]
        alike = sorted(range(len(requests)), key=lambda i: (repr(wishes[i].shared), len(requests[i].args[0])))
        with shown_progress("generate", len(requests), "requests", quiet=disable_tqdm) as advance:
            for some in _batches(alike, self.batch, key=lambda i: wishes[i].shared):
                wish = wishes[some[0]]
                room = max(1, self.max_length - wish.max_new_tokens)
                prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in some]
                done = self._together(Completing(prompts, wish.max_new_tokens, self.eos, wish.sampling))
                for i, ids in zip(some, done, strict=True):
                    results[i] = wishes[i].cut(self.tokenizer.decode(ids, skip_special_tokens=True))
                    self.cache_hook.add_partial("generate_until", requests[i].args, results[i])
                advance(len(some), "")
        return results

    def _together(self, work: Work) -> Any:
        self.model.topology.broadcast_object(work)
        return work.on(self.model)


@dataclass(frozen=True)
class _Wish:
    """What a task asks of a completion."""

    max_new_tokens: int
    sampling: Sampling
    until: tuple[str, ...]

    @classmethod
    def of(cls, given: dict[str, Any]) -> "_Wish":
        """From the harness's arguments. Raises ``InputError`` for one that would be passed over."""
        wanted = dict(normalize_gen_kwargs(given, NEW_TOKENS))
        limit, until = wanted.pop("max_gen_toks"), tuple(text for text in wanted.pop("until") if text)
        sampling = Sampling()
        if wanted.pop("do_sample"):
            known = {name: wanted.pop(name) for name in ("top_k", "top_p", "seed") if name in wanted}
            sampling = replace(Sampling(temperature=wanted["temperature"] or 1.0), **known)
        wanted.pop("temperature", None)
        if wanted:
            raise InputError(f"generation arguments that are not implemented: {', '.join(sorted(wanted))}")
        return cls(int(limit), sampling, until)

    @property
    def shared(self) -> tuple[int, Sampling]:
        """What the requests of a batch have in common."""
        return self.max_new_tokens, self.sampling

    def cut(self, text: str) -> str:
        """``text`` before the first of its stop texts."""
        return text[: min((text.index(stop) for stop in self.until if stop in text), default=len(text))]


def _batches(numbers: Sequence[int], size: int, key: Any = lambda _number: None) -> list[list[int]]:
    """``numbers`` in runs of at most ``size`` that have one ``key``."""
    batches: list[list[int]] = []
    for number in numbers:
        if batches and len(batches[-1]) < size and key(batches[-1][0]) == key(number):
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches
