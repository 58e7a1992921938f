"""How fast the kernels are, against what the same device does at best in the same run.

    python -m benchmarks.kernels [--json FILE]

On a GPU: median times with the L2 cache flushed before each call, beside a plain copy, cuBLAS's bfloat16 product and
torch's own block-scaled FP8 product where it takes the shape.
On a CPU: how fast weights are dequantised, in bytes of FP8 read, with one thread and with all.
"""

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.act_quant import act_quant
from kernels.device import has_fp8_product, triton
from kernels.fp8_gemm import fp8_gemm
from kernels.fused_moe import ExpertShapes, ExpertWeights, fused_moe
from kernels.latent_cache import PAGE
from kernels.mla_decode import mla_decode
from kernels.weight_dequant import weight_dequant

# DeepSeek-V3, N x K: q_a with kv_a, q_b, kv_b, o, gate with up of an expert, down of an expert
PRODUCTS = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
PRODUCT_ROWS = [1, 16, 64, 128, 4096]
WEIGHTS = [*PRODUCTS, (18432, 7168), (576, 7168)]
ACTIVATIONS = [(1, 7168), (128, 7168), (8192, 7168), (8192, 2048), (8192, 10944)]

# name, shapes (experts, width, inner, shared, width of a shared piece), experts a token, FP8, tokens
MIXTURES = [
    ("V2-Lite", ExpertShapes(64, 2048, 1408, 2, 1408), 6, False, (1, 8, 32, 2048)),
    ("V3", ExpertShapes(256, 7168, 2048, 1, 2048), 8, True, (1, 8, 32, 1024)),
]
# sequences, heads, positions of each
ATTENTIONS = [(1, 16, 512), (8, 16, 512), (32, 16, 512), (1, 128, 1024), (32, 128, 1024)]

TORCH_PRODUCT_ROWS = 16  # from here on torch._scaled_mm is measured too
SAME_PRODUCT = 1e-2  # relative to the Frobenius norm; both products round to bfloat16, by up to 2**-9

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark of the device at hand, print its table and write it where ``--json`` says."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description="Speed of the kernels.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    if on_gpu and not has_fp8_product(torch.device("cuda", torch.cuda.current_device())):
        parser.error("this GPU has no FP8 product; hide it (CUDA_VISIBLE_DEVICES=) to measure the CPU")
    torch.manual_seed(0)
    machine = describe_machine(on_gpu)
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    rows = measure_gpu() if on_gpu else measure_cpu()
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def describe_machine(on_gpu: bool) -> dict[str, str]:
    """What the figures depend on."""
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__ if triton is not None else "none",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def random_weight(N: int, K: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite FP8 codes and checkpoint-like scales. Random, since zeros make a GPU look faster than it is."""
    codes = torch.randint(0, 256, (N, K), dtype=torch.uint8, device=device)
    codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
    scales = torch.rand(-(-N // 128), -(-K // 128), device=device) * 2e-4 + 1e-5
    return codes.view(torch.float8_e4m3fn), scales


def require_every_element_written(kernel: Callable[[], Any]) -> None:
    """Call ``kernel`` once with outputs that hold NaN beforehand: a fast kernel that skips work is not fast."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills with NaN
    try:
        outputs = kernel()
    finally:
        torch.use_deterministic_algorithms(False)
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if not output.float().isfinite().all():
            raise SystemExit("a kernel left elements of its output unwritten, or wrote NaN")


def show(row: Row, rows: list[Row]) -> None:
    """Print ``row`` at once and keep it."""
    rows.append(row)
    cells = (f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    print("   ".join(cells), flush=True)


# ---- GPU ----


def microseconds(kernel: Callable[[], Any]) -> float:
    """Median time of one call on the GPU."""
    return float(triton.testing.do_bench(kernel, return_mode="median")) * 1e3


def graph_microseconds(kernel: Callable[[], Any], repeats: int = 20) -> float:
    """As ``microseconds``, of a captured graph: for what would else measure how fast Python launches."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            kernel()
        with torch.cuda.graph(graph, stream=stream):
            kernel()
    torch.cuda.current_stream().wait_stream(stream)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def measure_gpu() -> list[Row]:
    """Every kernel on DeepSeek-V3's shapes."""
    rows: list[Row] = []
    copy_rate = measure_copy(rows)
    for N, K in WEIGHTS:
        measure_weight_dequant(N, K, copy_rate, rows)
    for M, K in ACTIVATIONS:
        for scale_fmt in (None, "ue8m0"):
            measure_act_quant(M, K, scale_fmt, copy_rate, rows)
    for N, K in PRODUCTS:
        for M in PRODUCT_ROWS:
            measure_product(M, N, K, copy_rate, rows)
    for mixture in MIXTURES:
        for tokens in mixture[-1]:
            measure_experts(*mixture[:-1], tokens, copy_rate, rows)
    for attention in ATTENTIONS:
        measure_attention(*attention, copy_rate, rows)
    return rows


def measure_copy(rows: list[Row]) -> float:
    """Bytes read and written each second by a copy of 1 GiB."""
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    us = microseconds(lambda: target.copy_(source))
    rate = 2 * source.numel() / us * 1e6
    show({"kernel": "copy", "shape": "1 GiB", "us": us, "TB/s": rate / 1e12}, rows)
    return rate


def memory_bound(us: float, n_bytes: int, copy_rate: float) -> Row:
    """The figures of a kernel whose limit is memory."""
    rate = n_bytes / us * 1e6
    return {"us": us, "TB/s": rate / 1e12, "of copy": rate / copy_rate}


def measure_weight_dequant(N: int, K: int, copy_rate: float, rows: list[Row]) -> None:
    """One byte read and two written for each element."""
    w, s = random_weight(N, K, "cuda")
    require_every_element_written(lambda: weight_dequant(w, s))
    figures = memory_bound(microseconds(lambda: weight_dequant(w, s)), 3 * N * K + 4 * s.numel(), copy_rate)
    show({"kernel": "weight_dequant", "shape": f"{N}x{K}", **figures}, rows)


def measure_act_quant(M: int, K: int, scale_fmt: str | None, copy_rate: float, rows: list[Row]) -> None:
    """Two bytes read and one written for each element, and the scales."""
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    require_every_element_written(lambda: act_quant(x, scale_fmt=scale_fmt))
    us = microseconds(lambda: act_quant(x, scale_fmt=scale_fmt))
    figures = memory_bound(us, 3 * M * K + 4 * M * -(-K // 128), copy_rate)
    show({"kernel": "act_quant", "shape": f"{M}x{K}", "scale_fmt": scale_fmt or "float32", **figures}, rows)


def measure_product(M: int, N: int, K: int, copy_rate: float, rows: list[Row]) -> None:
    """The FP8 product beside the bfloat16 one; what limits it is memory at few rows, arithmetic at many."""
    b, b_s = random_weight(N, K, "cuda")
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    a, a_s = act_quant(x)
    require_every_element_written(lambda: fp8_gemm(a, a_s, b, b_s))
    us = graph_microseconds(lambda: fp8_gemm(a, a_s, b, b_s))
    linear_us = graph_microseconds(lambda: fp8_gemm(*act_quant(x), b, b_s))
    weight = weight_dequant(b, b_s)
    bf16_us = graph_microseconds(lambda: torch.nn.functional.linear(x, weight))
    figures = memory_bound(us, N * K + M * K + 2 * M * N, copy_rate)
    tflops = 2 * M * N * K / us / 1e6
    versus: Row = {"TFLOP/s": tflops, "with act_quant us": linear_us, "bf16 us": bf16_us,
                   "linear over bf16": bf16_us / linear_us}  # fmt: skip
    if M >= TORCH_PRODUCT_ROWS:
        versus |= measure_torch_product(x, a, a_s, b, b_s, linear_us)
    show({"kernel": "fp8_gemm", "shape": f"{N}x{K}", "M": M, **figures, **versus}, rows)


def measure_torch_product(
    x: torch.Tensor, a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, linear_us: float
) -> dict[str, float | str]:
    """torch's product of the same operands, alone and after ``act_quant``; why not, where it refuses."""
    a_scale, b_scale = a_s.t().contiguous().t(), b_s.contiguous().t()

    def linear() -> torch.Tensor:
        codes, scales = act_quant(x)
        by_column = scales.t().contiguous().t()
        return torch._scaled_mm(codes, b.t(), scale_a=by_column, scale_b=b_scale, out_dtype=torch.bfloat16)

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)

    try:
        ours = fp8_gemm(a, a_s, b, b_s).float()
        error = float((product().float() - ours).norm() / ours.norm())
    except (RuntimeError, ValueError) as refusal:  # by shape, by version of CUDA, by GPU
        return {"torch us": f"refused: {str(refusal).splitlines()[0]}"}
    if error > SAME_PRODUCT:
        raise SystemExit(f"torch's product differs from ours by {error:.2g}: they do not measure the same thing")
    with_quantisation = graph_microseconds(linear)
    return {"torch us": graph_microseconds(product), "linear over torch's": with_quantisation / linear_us}


def measure_experts(
    name: str, shapes: ExpertShapes, choices: int, fp8: bool, tokens: int, copy_rate: float, rows: list[Row]
) -> None:
    """Routed and shared experts of one layer; the floor is the weights of the experts that were chosen."""
    weights = ExpertWeights.empty(shapes, torch.float8_e4m3fn if fp8 else torch.bfloat16, "cuda")
    for stack in (weights.gate_up, weights.down):
        if fp8:
            stack.copy_(random_weight(1, stack.numel(), "cuda")[0][0])
        else:
            stack.normal_(0, 0.03)
    for scales in (weights.gate_up_scale, weights.down_scale):
        if scales is not None:
            scales.uniform_(1e-5, 2e-4)
    x = torch.randn(tokens, shapes.dim, device="cuda", dtype=torch.bfloat16)
    routed = torch.rand(tokens, shapes.experts, device="cuda").topk(choices).indices.int()
    shared = torch.arange(shapes.experts, shapes.count, device="cuda", dtype=torch.int32).expand(tokens, -1)
    indices = torch.cat([routed, shared], dim=1)
    require_every_element_written(lambda: fused_moe(x, indices, weights))
    us = graph_microseconds(lambda: fused_moe(x, indices, weights))
    touched = (
        (len(routed.unique()) + shapes.shared * shapes.shared_inner / shapes.inner) * 3 * shapes.dim * shapes.inner
    )
    figures = memory_bound(us, int(touched) * (1 if fp8 else 2), copy_rate)
    tflops = indices.numel() * 6 * shapes.dim * shapes.inner / us / 1e6
    show({"kernel": "fused_moe", "shape": name, "tokens": tokens, **figures, "TFLOP/s": tflops}, rows)


def measure_attention(B: int, H: int, positions: int, copy_rate: float, rows: list[Row]) -> None:
    """Absorbed attention of one token a sequence; the floor is reading the latents once."""
    pages_each = positions // PAGE
    pages = torch.randn(B * pages_each, PAGE, 576, device="cuda").bfloat16()
    table = torch.randperm(B * pages_each, device="cuda").view(B, pages_each).int()
    lengths = torch.full((B,), positions, device="cuda")
    q_latent = torch.randn(B, H, 512, device="cuda").bfloat16()
    q_rope = torch.randn(B, H, 64, device="cuda").bfloat16()
    to_values = (torch.randn(H, 128, 512, device="cuda") * 0.05).bfloat16()

    def attend() -> torch.Tensor:
        return mla_decode(q_latent, q_rope, pages, table, lengths, to_values, 0.05)[0]

    require_every_element_written(attend)
    figures = memory_bound(graph_microseconds(attend), 2 * (pages.numel() + to_values.numel()), copy_rate)
    show({"kernel": "mla_decode", "shape": f"{B} x {positions}, {H} heads", **figures}, rows)


# ---- CPU ----


def measure_cpu() -> list[Row]:
    """Dequantisation with one thread and with all."""
    rows: list[Row] = []
    all_threads = torch.get_num_threads()
    for threads in sorted({1, all_threads}):
        torch.set_num_threads(threads)
        for N, K in WEIGHTS:
            dequantise = functools.partial(weight_dequant, *random_weight(N, K, "cpu"))
            require_every_element_written(dequantise)
            rate = N * K / median_seconds(dequantise) / 1e9
            show({"kernel": "weight_dequant", "shape": f"{N}x{K}", "threads": threads, "GB/s read": rate}, rows)
    torch.set_num_threads(all_threads)
    return rows


def median_seconds(function: Callable[[], Any], calls: int = 5) -> float:
    """Median wall-clock time of a call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
