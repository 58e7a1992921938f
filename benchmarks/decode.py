"""How fast the engine decodes and reads prompts, with random weights at real dimensions, against the memory's floor.

    python -m benchmarks.decode [--json FILE] [--profile]

DeepSeek-V2-Lite in BF16, whole; DeepSeek-V3 in FP8 cut to 4 and to 7 layers (3 of them dense), whose difference is the
time of a MoE layer. The floor of a step is the bytes of the weights that it touches, at the rate of a device copy
measured in the same run. Tokens are chosen by argmax and stay on the device. GPU only.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import Row, describe_machine, measure_copy, show
from model.args import ModelArgs
from model.engine.engine import Engine, Limits
from model.engine.weights import allocate
from model.layers import Execution
from model.topology import Topology

BATCHES = (1, 8, 32)
CONTEXTS = (512, 1024)
STEPS = 24
REPEATS = 5

V2_LITE = ModelArgs()  # the official defaults are those of DeepSeek-V2-Lite

V3 = ModelArgs(
    vocab_size=129280, dim=7168, inter_dim=18432, moe_inter_dim=2048, n_layers=61, n_dense_layers=3, n_heads=128,
    n_routed_experts=256, n_shared_experts=1, n_activated_experts=8, n_expert_groups=8, n_limited_groups=4,
    score_func="sigmoid", norm_topk_prob=True, gate_bias=True, route_scale=2.5, q_lora_rank=1536, kv_lora_rank=512,
    dtype="fp8",
)  # fmt: skip


def random_engine(args: ModelArgs, batch: int, context: int) -> Engine:
    """An engine whose weights are random: finite FP8 codes and small scales, or BF16 of a trained size."""
    execution = Execution(Topology(), torch.device("cuda"), torch.bfloat16, fp8=args.dtype == "fp8")
    model = allocate(args, execution)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            codes = torch.randint(0, 255, parameter.shape, dtype=torch.uint8, device="cuda")
            parameter.data.view(torch.uint8).copy_(torch.where(codes & 0x7F == 0x7F, 0, codes))
        elif name.endswith("scale"):
            parameter.data.uniform_(1e-5, 2e-4)
        elif "norm" in name:
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, 0.02)
    return Engine(model, Limits(batch=batch, context=context))


def touched_bytes(args: ModelArgs, tokens: int) -> float:
    """Bytes of weights that a step of so many tokens reads, if experts are chosen evenly; embedding rows left out."""
    size = 1 if args.dtype == "fp8" else 2
    expert = 3 * args.dim * args.moe_inter_dim
    share = 1 - (1 - args.n_activated_experts / args.n_routed_experts) ** tokens
    moe = (args.n_routed_experts * share + args.n_shared_experts) * expert
    query = args.n_heads * args.qk_head_dim
    into = args.dim * query if args.q_lora_rank == 0 else args.q_lora_rank * (args.dim + query)
    latent = args.dim * (args.kv_lora_rank + args.qk_rope_head_dim)
    attention = size * (into + latent + args.n_heads * args.v_head_dim * args.dim)
    attention += 2 * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim) * args.kv_lora_rank
    dense = args.n_dense_layers * size * 3 * args.dim * args.inter_dim
    moe_layers = args.n_layers - args.n_dense_layers
    return args.n_layers * attention + dense + moe_layers * size * moe + 2 * args.vocab_size * args.dim


def median_ms(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median GPU time of a call in milliseconds, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def decode_ms(engine: Engine, batch: int, context: int) -> float:
    """Milliseconds of a step of ``batch`` sequences that stand around position ``context``."""
    prompt = context - STEPS
    prompts = torch.randint(0, engine.model.args.vocab_size, (batch, prompt)).tolist()
    logits = engine.join(prompts, [STEPS * (REPEATS + 2)] * batch)

    def steps() -> None:
        nonlocal logits
        for _ in range(STEPS):
            engine.choose(logits.argmax(dim=-1))
            logits = engine.step()
        if not logits.isfinite().all():
            raise SystemExit("a step gave NaN or infinity: its time means nothing")

    took = median_ms(steps) / STEPS
    for row in reversed(range(batch)):
        engine.leave(row)
    return took


def prefill_ms(engine: Engine, length: int) -> float:
    """Milliseconds to read one prompt."""
    prompt = torch.randint(0, engine.model.args.vocab_size, (1, length)).tolist()

    def read() -> None:
        engine.join(prompt, [1])
        engine.leave(0)

    return median_ms(read)


def measure_v2_lite(copy_rate: float, rows: list[Row]) -> None:
    """Tokens a second of the whole model."""
    engine = random_engine(V2_LITE, max(BATCHES), 2048 + 64)
    for context in CONTEXTS:
        for batch in BATCHES:
            ms = decode_ms(engine, batch, context)
            floor = touched_bytes(V2_LITE, batch) / copy_rate * 1e3
            figures = {"ms": ms, "tok/s": batch / ms * 1e3, "floor ms": floor, "of floor": ms / floor}
            show({"model": "V2-Lite BF16", "decode": f"{batch} x {context}", **figures}, rows)
    ms = prefill_ms(engine, 2048)
    show({"model": "V2-Lite BF16", "prefill": "1 x 2048", "ms": ms, "tok/s": 2048 / ms * 1e3}, rows)


def measure_v3(copy_rate: float, rows: list[Row]) -> None:
    """Milliseconds of a MoE layer, as the difference between 7 and 4 layers."""
    cut = {layers: V3.replace(n_layers=layers) for layers in (4, 7)}
    found: dict[int, dict[str, float]] = {}
    for layers, args in cut.items():
        engine = random_engine(args, max(BATCHES), 2048)
        decodes = {f"decode {batch} x {context}": decode_ms(engine, batch, context)
                   for context in CONTEXTS for batch in BATCHES}  # fmt: skip
        found[layers] = decodes | {"prefill 1 x 1024": prefill_ms(engine, 1024)}
        del engine
        torch.cuda.empty_cache()
    for what in found[4]:
        ms = (found[7][what] - found[4][what]) / 3
        row: Row = {"model": "V3 FP8, a MoE layer", "what": what, "ms": ms}
        if what.startswith("decode"):
            tokens = int(what.split()[1])
            floor = (touched_bytes(cut[7], tokens) - touched_bytes(cut[4], tokens)) / 3 / copy_rate * 1e3
            row |= {"floor ms": floor, "of floor": ms / floor}
        show(row, rows)


def profile(args: ModelArgs, batch: int, prompt: int | None = None) -> None:
    """Print where the time of a step, or of reading a prompt, goes, kernel by kernel."""
    engine = random_engine(args, batch, 2048 + 64)
    prompts = torch.randint(0, args.vocab_size, (batch, 512)).tolist()
    logits = engine.join(prompts, [64] * batch)
    engine.choose(logits.argmax(dim=-1))
    engine.step()
    if prompt:
        engine.leave(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        if prompt:
            engine.join(torch.randint(0, args.vocab_size, (1, prompt)).tolist(), [1])
        else:
            engine.step()
        torch.cuda.synchronize()
    print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=50))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a step")
    options = parser.parse_args()
    torch.manual_seed(0)
    machine = describe_machine(on_gpu=True)
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    rows: list[Row] = []
    copy_rate = measure_copy(rows)
    measure_v2_lite(copy_rate, rows)
    torch.cuda.empty_cache()
    measure_v3(copy_rate, rows)
    if options.profile:
        profile(V2_LITE, 1)
        profile(V2_LITE, 8)
        profile(V2_LITE, 1, prompt=2048)
        profile(V3.replace(n_layers=4), 1)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
