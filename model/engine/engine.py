"""A running batch: sequences join with their prompts, take one token a step together, and leave at any step.

Shapes: B rows of the batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.device import has_fp8_product
from kernels.latent_cache import PAGE
from model.checkpoint.manifest import Manifest, shard_name
from model.engine.forward import Forward, Where
from model.engine.graphs import Graphs
from model.engine.pages import SCRATCH, Pages, pages_for
from model.engine.weights import allocate, gather
from model.load import execution_for, fill
from model.topology import Topology
from model.transformer import Transformer

PREFILL_TOKENS = 8192
"""Padded tokens of prompts that are taken at once: more only cost memory."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Graphs of a step; a batch of another size runs in the next larger one, whose further rows are not looked at."""

PROMPT_LENGTHS = (32, 64, 128, 256)
PROMPT_STEP = 512
"""Graphs of prompts: padded to one of these lengths, or beyond to a multiple of the step."""


@dataclass
class Running:
    """One sequence of the batch: its pages, how many positions it has, and how many it may get."""

    pages: list[int]
    length: int
    limit: int


@dataclass(frozen=True)
class Limits:
    """``batch`` sequences at most, ``context`` positions for each, and ``pages`` of 64 positions for all together."""

    batch: int = 32
    context: int = 4096
    pages: int | None = None

    @property
    def total_pages(self) -> int:
        """As given, or enough for a full batch of full contexts."""
        return self.pages if self.pages is not None else self.batch * pages_for(self.context)


@dataclass
class Rows:
    """What a step reads, one row a sequence, on the device: its newest token, where that stands, its pages."""

    tokens: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    running: list[Running] = field(default_factory=list)


@dataclass(frozen=True)
class Prompts:
    """What a prefill reads, on the device: token ids (B, S), lengths (B,), and the rows' pages (B, …)."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


class Engine:
    """Weights, pages and the running batch of one rank. Every rank makes the same calls.

    Rows 0 to ``running`` - 1 are sequences; a sequence that leaves gives its row to the last one. With ``graphs``
    (default: on a GPU) a step is one launch for each batch size, and so are prompts for each padded shape.
    """

    def __init__(self, model: Transformer, limits: Limits, *, graphs: bool | None = None) -> None:
        self.model, self.limits = model, limits
        self.device = model.device
        self.pages = Pages(model.args, model.execution, limits.total_pages)
        width = pages_for(limits.context)
        self.rows = Rows(
            torch.zeros(limits.batch, dtype=torch.long, device=self.device),
            torch.zeros(limits.batch, dtype=torch.long, device=self.device),
            torch.full((limits.batch, width), SCRATCH, dtype=torch.int32, device=self.device),
        )
        self.forward = Forward(model, gather(model), limits.context)
        kernels = has_fp8_product(self.device) and model.execution.dtype == torch.bfloat16
        use_graphs = kernels if graphs is None else graphs  # the references, in other dtypes, wait for the device
        self._steps = Graphs(self._step, self.device, kept=(self.rows.positions,)) if use_graphs else None
        self._prefills = Graphs(self._prefill_static, self.device) if use_graphs else None
        self._static: dict[tuple[int, int], Prompts] = {}

    @property
    def running(self) -> int:
        """How many sequences there are."""
        return len(self.rows.running)

    def fits(self, prompt: int, new: int) -> bool:
        """Whether a prompt of so many tokens, with so many new ones, could join now."""
        free_row = self.running < self.limits.batch
        return free_row and prompt + new <= self.limits.context and pages_for(prompt + new) <= self.pages.free

    @torch.inference_mode()
    def join(self, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> torch.Tensor:
        """Take prompts in as the last rows, each for at most ``new`` more tokens; logits (prompts, V) after each.

        The caller has asked ``fits``. Their next tokens are told by ``choose``.
        """
        first = self.running
        for prompt, count in zip(prompts, new, strict=True):
            assert self.fits(len(prompt), count), "a sequence joined that does not fit"
            limit = len(prompt) + count
            self.rows.running.append(Running(self.pages.lend(pages_for(limit)), len(prompt), limit))
        self._tell_rows(range(first, self.running))
        return torch.cat([self._prefill(first + begin, part) for begin, part in _parts(prompts)])

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Logits (running, V), float32, after the token that was chosen last for every row.

        They are valid until the next step.
        """
        count = self.running
        logits = self._steps.replay(self._batch_size(count)) if self._steps else self._step(count)
        for sequence in self.rows.running:
            sequence.length += 1
        return logits[:count]

    @torch.inference_mode()
    def choose(self, tokens: torch.Tensor) -> None:
        """The next token (running,) of every row."""
        self.rows.tokens[: self.running] = tokens

    def warm_up(self) -> None:
        """Capture the graph of every batch size, largest first, so that no request waits for it."""
        if self._steps:
            for size in sorted({self._batch_size(count) for count in range(1, self.limits.batch + 1)}, reverse=True):
                self._steps.capture(size)

    def leave(self, row: int) -> None:
        """Take the sequence of ``row`` out; the last row takes its place."""
        last = self.running - 1
        sequences = self.rows.running
        self.pages.give_back(sequences[row].pages)
        sequences[row] = sequences[last]
        sequences.pop()
        for state in (self.rows.tokens, self.rows.positions, self.rows.table):
            state[row] = state[last]
            state[last] = SCRATCH

    def _tell_rows(self, rows: range) -> None:
        """Bring the pages and lengths of new rows to the device."""
        table = torch.full((len(rows), self.rows.table.shape[1]), SCRATCH, dtype=torch.int32)
        for number, row in enumerate(rows):
            pages = self.rows.running[row].pages
            table[number, : len(pages)] = torch.tensor(pages)
        self.rows.table[rows.start : rows.stop] = table.to(self.device, non_blocking=True)
        lengths = torch.tensor([self.rows.running[row].length for row in rows])
        self.rows.positions[rows.start : rows.stop] = lengths.to(self.device, non_blocking=True)

    def _prefill(self, first: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits (prompts, V) after the prompts of the rows from ``first`` on."""
        count, longest = len(prompts), max(map(len, prompts))
        padded = self._padded(count, longest) if self._prefills else None
        shape = padded or (count, longest)
        tokens = torch.zeros(shape, dtype=torch.long)
        lengths = torch.ones(shape[0], dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
            lengths[row] = len(prompt)
        table = self.rows.table[first : first + count]
        if self._prefills is None or padded is None:
            given = Prompts(tokens.to(self.device), lengths.to(self.device), table)
            return self._prefill_of(given)
        static = self._static_prompts(shape)
        static.tokens.copy_(tokens, non_blocking=True)
        static.lengths.copy_(lengths, non_blocking=True)
        static.table.fill_(SCRATCH)
        static.table[:count] = table
        return self._prefills.replay(shape)[:count].clone()

    def _padded(self, count: int, longest: int) -> tuple[int, int] | None:
        """The shape of the graph for so many prompts, one of few; None for what is too long for a graph."""
        steps = -(-longest // PROMPT_STEP) * PROMPT_STEP
        padded = next((length for length in PROMPT_LENGTHS if length >= longest), steps)
        padded = min(padded, self.limits.context)
        size = 1 << (count - 1).bit_length()
        return None if size * padded > PREFILL_TOKENS else (size, padded)

    def _static_prompts(self, shape: tuple[int, int]) -> Prompts:
        if shape not in self._static:
            self._static[shape] = Prompts(
                torch.zeros(shape, dtype=torch.long, device=self.device),
                torch.ones(shape[0], dtype=torch.long, device=self.device),
                torch.full((shape[0], self.rows.table.shape[1]), SCRATCH, dtype=torch.int32, device=self.device),
            )
        return self._static[shape]

    def _prefill_static(self, shape: tuple[int, int]) -> torch.Tensor:
        return self._prefill_of(self._static_prompts(shape))

    def _prefill_of(self, prompts: Prompts) -> torch.Tensor:
        position = torch.arange(prompts.tokens.shape[1], device=self.device).expand(prompts.tokens.shape)
        places = self._places(prompts.table, position)
        places = torch.where(position < prompts.lengths[:, None], places, position % PAGE)  # padding: the scratch page
        where = Where(position.flatten(), places.flatten())
        return self.forward.prefill(prompts.tokens, prompts.lengths, where, self.pages.values)

    def _batch_size(self, count: int) -> int:
        return min(next((size for size in BATCH_SIZES if size >= count), self.limits.batch), self.limits.batch)

    def _step(self, count: int) -> torch.Tensor:
        """One token of the first ``count`` rows, which then stand one position further."""
        positions, table = self.rows.positions[:count], self.rows.table[:count]
        where = Where(positions, self._places(table, positions[:, None]).flatten())
        logits = self.forward.decode(self.rows.tokens[:count], where, table, self.pages.values)
        # Rows without a sequence stay where they are, and one that has ended but not left goes no further.
        positions += self.rows.table[:count, 0] != SCRATCH
        positions.clamp_(max=self.limits.context - 1)
        return logits

    @staticmethod
    def _places(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the pages for positions (B, S) of the sequences of ``table`` (B, …)."""
        return table.gather(1, positions // PAGE).long() * PAGE + positions % PAGE


def load_engine(
    directory: Path,
    manifest: Manifest,
    topology: Topology,
    device: torch.device,
    limits: Limits,
    *,
    dtype: torch.dtype | None = None,
    fp8: bool | None = None,
) -> Engine:
    """This rank's part of the checkpoint, streamed tensor by tensor to where the engine reads it."""
    execution = execution_for(directory, manifest, topology, device, dtype=dtype, fp8=fp8)
    model = allocate(manifest.args, execution)
    fill(model, directory / shard_name(topology.rank, topology.size), manifest.args.block_size)
    return Engine(model, limits)


def _parts(prompts: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[Sequence[int]]]]:
    """Runs of prompts whose padded tokens stay within ``PREFILL_TOKENS``, each with the number of its first."""
    parts: list[tuple[int, Sequence[Sequence[int]]]] = []
    begin = 0
    while begin < len(prompts):
        end, longest = begin + 1, len(prompts[begin])
        while end < len(prompts) and (end - begin + 1) * max(longest, len(prompts[end])) <= PREFILL_TOKENS:
            longest = max(longest, len(prompts[end]))
            end += 1
        parts.append((begin, prompts[begin:end]))
        begin = end
    return parts
