"""This project's ``kernels`` shadows a distribution of that name, which transformers looks for."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

FORWARD = """
import torch, transformers
import kernels
assert kernels.__file__.startswith({root!r}), kernels.__file__
config = transformers.DeepseekV3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
    first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
)
logits = transformers.AutoModelForCausalLM.from_config(config)(torch.arange(5)[None]).logits
assert logits.shape == (1, 5, 64)
"""


def test_transformers_runs_from_the_repository_s_root():
    script = FORWARD.format(root=str(ROOT))
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_imports_run_one_way():
    """kernels ← model ← tasks ← flows, and model/checkpoint without Prefect, Triton or a process group."""
    order = ["kernels", "model", "tasks", "flows"]
    for position, package in enumerate(order):
        for path in (ROOT / package).rglob("*.py"):
            lines = [line.strip() for line in path.read_text().splitlines()]
            imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
            assert not imported & set(order[position + 1 :]), path
            if package in ("kernels", "model"):
                assert not imported & {"prefect", "pydantic", "typer", "fastapi", "rich"}, path
            if "checkpoint" in path.parts:
                assert not imported & {"triton"}, path
                assert not any("torch.distributed" in line for line in lines), path
