"""What can be said of the Triton kernels without a GPU: they compute the right thing, and they compile for Hopper."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import act_quant, fp8_gemm, weight_dequant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kernels", ["interpreted.py", "interpreted_decode.py"])
def test_kernels_through_the_interpreter(kernels):
    pytest.importorskip("triton")
    # Triton decides when a kernel is defined whether to interpret it, so this needs a process of its own.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels/{kernels}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d{2,} passed", run.stdout), run.stdout


def test_references_work_without_triton():
    script = """
import sys
sys.modules["triton"] = None  # what an import of it then meets is an ImportError
import torch
from kernels.act_quant import act_quant
from kernels.device import has_fp8_product
from kernels.fp8_gemm import fp8_gemm
from kernels.weight_dequant import weight_dequant
q, s = act_quant(torch.full((3, 192), 2.0))
weight, scales = torch.ones(5, 192).to(torch.float8_e4m3fn), torch.ones(1, 2)
assert fp8_gemm(q, s, weight, scales, torch.float32).tolist() == [[384.0] * 5] * 3
assert weight_dequant(weight, scales).tolist() == [[1.0] * 192] * 5
assert not has_fp8_product(torch.device("cuda"))
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def ptx_for_hopper(kernel, types, constants, aligned, **options):
    """Compile a kernel for an H200, which needs none, with arguments of these Triton ``types`` and ``constants``."""
    triton = pytest.importorskip("triton")
    position = kernel.arg_names.index
    source = triton.compiler.ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        {(position(name),): value for name, value in constants.items()},
        {(position(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]


@pytest.fixture(autouse=True)
def _own_triton_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_act_quant_compiles_to_exact_divisions(dtype, ue8m0):
    ptx = ptx_for_hopper(
        act_quant._act_quant_kernel,
        {"x_ptr": f"*{dtype}", "q_ptr": "*fp8e4nv", "s_ptr": "*fp32", "K": "i32", "row_stride": "i32"},
        {
            "BLOCK": 128,
            "GROUPS": act_quant.GROUPS_PER_PROGRAM,
            "LARGEST": act_quant.FP8_MAX,
            "LEAST_AMAX": act_quant.SMALLEST_AMAX,
            "UE8M0": ue8m0,
            "OVERLAP": False,
        },
        ["x_ptr", "q_ptr", "s_ptr", "K", "row_stride"],
    )
    assert set(re.findall(r"div\.\w+\.f32", ptx)) == {"div.rn.f32"}
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4" in ptx


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weight_dequant_compiles_to_wide_accesses(dtype):
    pointers = {"w_ptr": "*fp8e4nv", "s_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    ptx = ptx_for_hopper(
        weight_dequant._weight_dequant_kernel,
        pointers | dict.fromkeys(["N", "K", "row_stride", "first_row"], "i32"),
        {
            "BLOCK_ROWS": 128,
            "BLOCK_COLUMNS": 128,
            "TILE_ROWS": weight_dequant.TILE_ROWS,
            "TILE_BLOCKS": weight_dequant.TILE_BLOCKS,
            "TILE_COLUMNS": 128,
        },
        [*pointers, "K", "row_stride"],
    )
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
    assert "mul.ftz" not in ptx


@pytest.mark.parametrize(
    ("tile", "whole_k"), [*((tile, True) for tile in fp8_gemm.TILES), (fp8_gemm.TILES[0], False)], ids=str
)
def test_fp8_gemm_compiles_to_tensor_core_products(tile, whole_k):
    block_m, block_n, warps, stages = tile
    pointers = {"a_ptr": "*fp8e4nv", "a_s_ptr": "*fp32", "b_ptr": "*fp8e4nv", "b_s_ptr": "*fp32", "out_ptr": "*bf16"}
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": fp8_gemm.BLOCK, "GROUP_M": fp8_gemm.GROUP_M}
    ptx = ptx_for_hopper(
        fp8_gemm._fp8_gemm_kernel,
        pointers | dict.fromkeys(["M", "N", "K", "M_RANGE"], "i32"),
        sizes | {"WHOLE_K": whole_k},
        [*pointers, "N", "K"],
        num_warps=warps,
        num_stages=stages,
    )
    assert ("wgmma.mma_async" if block_m >= 64 else "mma.sync") in ptx
    assert "cp.async" in ptx
