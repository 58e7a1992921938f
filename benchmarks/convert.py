"""How close conversion comes to the storage: ``python -m benchmarks.convert DIRECTORY [--size 8GB] [--json F]``.

Builds a DeepSeek-V3-shaped FP8 checkpoint below DIRECTORY (real widths, fewer layers and experts), then measures in
one run, on the same files, each stage, and around each stage the storage's own read and write rate. Before each
measurement the files' pages are dropped from the cache; a stage ends when its output is on the disk (fsync). The limit
of a stage is the time that its bytes need: read + write, where both are on one device.

With ``--cached`` the same is measured from the page cache and without fsync.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch

from model.args import ModelArgs
from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
from model.checkpoint.digest import sha256_of
from model.checkpoint.headers import ITEMSIZE, LENGTH_BYTES
from model.checkpoint.names import bindings, scale_shape, source_scale
from model.checkpoint.source import INDEX
from model.checkpoint.verify import verify

FILE_BYTES = 1 << 30
CHUNK = 8 << 20
GB = 10**9


def arguments_of(size: int) -> ModelArgs:
    """V3's widths with as many experts as give about ``size`` bytes of FP8."""
    fixed, expert = 1.9 * GB, 3 * 7168 * 2048
    layers = 4
    experts = max(16, int((size - fixed) / (layers - 1) / expert) // 8 * 8)
    return ModelArgs(
        vocab_size=32768, dim=7168, inter_dim=18432, moe_inter_dim=2048, n_layers=layers, n_dense_layers=1,
        n_heads=128, n_routed_experts=experts, n_shared_experts=1, n_activated_experts=8, n_expert_groups=8,
        n_limited_groups=4, score_func="sigmoid", norm_topk_prob=True, gate_bias=True, route_scale=2.5,
        q_lora_rank=1536, kv_lora_rank=512, dtype="fp8",
    )  # fmt: skip


def config_of(args: ModelArgs) -> dict[str, Any]:
    """The ``config.json`` of ``args``."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": args.vocab_size,
        "hidden_size": args.dim, "intermediate_size": args.inter_dim, "moe_intermediate_size": args.moe_inter_dim,
        "num_hidden_layers": args.n_layers, "first_k_dense_replace": args.n_dense_layers,
        "num_attention_heads": args.n_heads, "n_routed_experts": args.n_routed_experts, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 0,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                "weight_block_size": [128, 128]},
    }  # fmt: skip


def build(directory: Path, args: ModelArgs) -> None:
    """Write the checkpoint with random codes (no NaN), BF16 and scales."""
    directory.mkdir(parents=True)
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for binding in bindings(args):
        dtype = "F8_E4M3" if binding.linear else "F32" if binding.source.endswith("bias") else "BF16"
        tensors.append((binding.source, dtype, binding.shape))
        if binding.linear:
            tensors.append((source_scale(binding.source), "F32", scale_shape(binding.shape, args.block_size)))
    files: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _size(tensor[1], tensor[2])
        if filled and filled + size > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += size
    codes = torch.randint(0, 127, (CHUNK,), dtype=torch.uint8).numpy().tobytes()
    scales = (torch.rand(CHUNK // 4) / 100 + 0.001).numpy().tobytes()
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        weight_map |= {tensor[0]: name for tensor in part}
        _write(directory / name, part, codes, scales)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config_of(args)))


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    size = ITEMSIZE[dtype]
    for dimension in shape:
        size *= dimension
    return size


def _write(path: Path, part: list[tuple[str, str, tuple[int, ...]]], codes: bytes, scales: bytes) -> None:
    header, end = {}, 0
    for name, dtype, shape in part:
        begin, end = end, end + _size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for _, dtype, shape in part:
            left, data = _size(dtype, shape), scales if dtype == "F32" else codes
            while left > 0:
                left -= file.write(data[: min(left, len(data))])


class Storage:
    """Files below one directory, measured cold with fsync, or from the page cache without."""

    def __init__(self, directory: Path, cached: bool, workers: int) -> None:
        self.directory, self.cached, self.workers = directory, cached, workers

    def settle(self, *directories: Path) -> None:
        """Bring the files of ``directories`` into the state that is measured: on disk and uncached, or cached."""
        os.sync()
        for directory in directories:
            for path in directory.rglob("*"):
                if path.is_file():
                    self._warm(path) if self.cached else self._drop(path)

    def read(self, directory: Path) -> float:
        """Seconds that ``workers`` threads need to read all files."""
        self.settle(directory)
        paths = sorted(directory.glob("*.safetensors"))
        return self._timed(lambda: self._in_threads(self._warm, paths))

    def write(self, directory: Path, size: int) -> float:
        """Seconds that ``workers`` threads need to write ``size`` bytes, fsync included unless cached."""
        directory.mkdir()
        data = os.urandom(CHUNK)

        def write_one(path: Path) -> None:
            with path.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size // self.workers)
                for _ in range(size // self.workers // CHUNK):
                    file.write(data)
                if not self.cached:
                    os.fsync(file.fileno())

        paths = [directory / f"{number}.bin" for number in range(self.workers)]
        seconds = self._timed(lambda: self._in_threads(write_one, paths))
        shutil.rmtree(directory)
        return seconds

    def stage(self, work: Callable[[], object], *inputs: Path) -> float:
        """Seconds of ``work`` on ``inputs``."""
        self.settle(*inputs)
        with _without_fsync() if self.cached else nullcontext():
            return self._timed(work)

    def _in_threads(self, action: Callable[[Path], None], paths: list[Path]) -> None:
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(action, paths))

    @staticmethod
    def _timed(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    @staticmethod
    def _warm(path: Path) -> None:
        buffer = bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    @staticmethod
    def _drop(path: Path) -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _without_fsync() -> Iterator[None]:
    with unittest.mock.patch("os.fsync"):
        yield


def measure(directory: Path, size: int, workers: int, cached: bool) -> list[dict[str, Any]]:
    """All figures of one run, as rows."""
    args, source = arguments_of(size), directory / "source"
    if not source.exists():
        build(source, args)
    storage = Storage(directory, cached, workers)
    resources = Resources(workers=workers)
    fp8 = _bytes(source)
    bf16 = sum(2 * _size("U8", binding.shape) for binding in bindings(args))
    rates = [_rates(storage, directory, fp8)]
    rows = [_row("hash source", fp8, storage.stage(lambda: _hash(source), source))]
    out = directory / "out"
    fused, staged = out / "fused", out / "bf16"
    stages: tuple[tuple[str, int, int, Callable[[], object], Path, tuple[Path, ...]], ...] = (
        ("FP8 pass-through", fp8, fp8, lambda: convert(source, out / "fp8", mp=2, resources=resources), source,
         (out / "fp8",)),
        ("fused FP8 to BF16", fp8, bf16, lambda: convert(source, fused, mp=2, weights="bf16", resources=resources),
         source, ()),
        ("verify fused", fp8 + 2 * bf16, 0, lambda: verify(fused, source), source, (fused,)),
        ("dequantize", fp8, bf16, lambda: dequantize(source, staged, resources=resources), source, ()),
        ("convert from BF16", bf16, bf16, lambda: convert(staged, out / "last", mp=2, resources=resources), staged,
         (out,)),
    )  # fmt: skip
    for name, read, written, work, inputs, done_with in stages:
        rows.append(_row(name, read + written, storage.stage(work, inputs)))
        for path in done_with:
            shutil.rmtree(path)
        # A storage whose rate moves is measured before and after each stage, which is held to the mean of both.
        rates.append(_rates(storage, directory, fp8))
        read_s, write_s = (statistics.mean(seconds) for seconds in zip(*rates[-2:], strict=True))
        rows[-1]["of limit"] = rows[-1]["s"] / ((read * read_s + written * write_s) / fp8)
    reads, writes = zip(*rates, strict=True)
    return [_row("storage read", fp8, statistics.median(reads)), _row("storage write", fp8, statistics.median(writes)),
            *rows]  # fmt: skip


def _rates(storage: Storage, directory: Path, size: int) -> tuple[float, float]:
    """Seconds that the storage needs now to read the source, of ``size`` bytes, and to write as much."""
    return storage.read(directory / "source"), storage.write(directory / "raw", size)


def _row(stage: str, size: int, seconds: float) -> dict[str, Any]:
    return {"stage": stage, "GB": size / GB, "s": seconds, "GB/s": size / GB / seconds}


def _hash(source: Path) -> None:
    for path in sorted(source.glob("*.safetensors")):
        sha256_of(path)


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to work; 45 GB must be free for --size 8")
    parser.add_argument("--size", type=float, default=8.0, help="GB of FP8 weights (default 8)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cached", action="store_true", help="from the page cache, without fsync")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(options.directory / "cache")
    shutil.rmtree(options.directory / "cache", ignore_errors=True)
    rows = measure(options.directory, int(options.size * GB), options.workers, options.cached)
    state = "page cache, no fsync" if options.cached else "cold, fsync included"
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {date.today()}, {state}")
    for row in rows:
        ratio = f"{row['of limit']:8.2f} x limit" if "of limit" in row else ""
        print(f"{row['stage']:<20}{row['GB']:8.2f} GB{row['s']:9.1f} s{row['GB/s']:8.2f} GB/s{ratio}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
