"""BF16 and FP8 against float32 on real text, teacher-forced: two correct paths differ there in their greedy text.

The text is characters 20,000 to 32,000 of the held-out play; the windows are those of tiny-v3's README.
"""

from dataclasses import dataclass

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from model.engine.engine import Limits, load_engine
from model.load import load_model
from model.topology import Topology
from tests.model.oracle import ASSETS, TINY_V3

WINDOW = 512
TOKENS = 3072
NATS = 3.47490  # transformers in float32 after exact dequantisation: tests/assets/tiny-v3/README.md


@dataclass(frozen=True)
class Gate:
    """The most that a computation may differ from float32: mean KL divergence in nats, least top-1 agreement."""

    kl: float
    agreement: float


BF16 = Gate(kl=2e-3, agreement=0.97)
FP8 = Gate(kl=1e-2, agreement=0.94)


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_V3)
    text = (ASSETS / "macbeth-slice.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False)[:TOKENS]
    ids = torch.tensor([[tokenizer.bos_token_id, *ids]])
    return [ids[:, start : start + WINDOW] for start in range(0, ids.shape[1] - 1, WINDOW - 1)]


def predictions(directory, windows, device="cpu", **how) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary) of what follows each token but a window's last, in float32."""
    model = load_model(directory, read_manifest(directory), Topology(), torch.device(device), **how)
    logits = [
        model(ids.to(device), 0, model.new_cache(*ids.shape), all_positions=True)[0, :-1].cpu() for ids in windows
    ]
    return torch.cat(logits).log_softmax(dim=-1)


@pytest.fixture(scope="module")
def float32(shards, windows) -> torch.Tensor:
    return predictions(shards("tiny-v3", 1), windows)


def assert_within(gate: Gate, actual: torch.Tensor, float32: torch.Tensor) -> None:
    kl = float((float32.exp() * (float32 - actual)).sum(dim=-1).mean())
    agreement = float((actual.argmax(dim=-1) == float32.argmax(dim=-1)).float().mean())
    print(f"KL {kl:.2e}, agreement {agreement:.4f}")
    assert kl <= gate.kl
    assert agreement >= gate.agreement


def test_float32_predicts_the_text_as_transformers_does(float32, windows):
    following = torch.cat([ids[0, 1:] for ids in windows])
    assert len(following) == TOKENS
    mean = -float(float32.gather(-1, following[:, None]).mean())
    assert mean == pytest.approx(NATS, abs=2e-5)


@pytest.mark.parametrize("attention", ["naive", "absorbed"])
def test_bf16_compute(attention, shards, windows, float32):
    actual = predictions(shards("tiny-v3", 1), windows[:2], dtype=torch.bfloat16, attention=attention)
    assert_within(BF16, actual, float32[: len(actual)])


@pytest.mark.parametrize("attention", ["naive", "absorbed"])
def test_fp8_activations(attention, shards, windows, float32):
    """The product of the kernels' plain-torch references, in float32 otherwise."""
    actual = predictions(shards("tiny-v3-fp8", 1), windows[:2], fp8=True, attention=attention)
    assert_within(FP8, actual, float32[: len(actual)])


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "absorbed"])
@pytest.mark.parametrize(("case", "fp8", "gate"), [("tiny-v3", False, BF16), ("tiny-v3-fp8", True, FP8)])
def test_gpu(case, fp8, gate, attention, shards, windows, float32):
    """On CUDA: BF16 shards in BF16, and FP8 shards through the Triton kernels, each the device's own default."""
    actual = predictions(shards(case, 1), windows, device="cuda", fp8=fp8, attention=attention)
    assert_within(gate, actual, float32)


def engine_predictions(directory, windows, device="cpu", **how) -> torch.Tensor:
    """As ``predictions``, by the engine: half of each window read at once, the rest token by token."""
    limits = Limits(batch=len(windows), context=WINDOW)
    manifest = read_manifest(directory)
    engine = load_engine(directory, manifest, Topology(), torch.device(device), limits, **how)
    half = WINDOW // 2
    ids = torch.cat(windows)[:, :WINDOW]
    steps = [engine.join(ids[:, :half].tolist(), [WINDOW - half] * len(windows)).cpu()]
    for position in range(half, WINDOW - 1):
        engine.choose(ids[:, position].to(device))
        steps.append(engine.step().cpu())
    return torch.stack(steps, dim=1).flatten(0, 1).log_softmax(dim=-1)


def second_halves(float32: torch.Tensor, windows: int) -> torch.Tensor:
    return float32[: windows * (WINDOW - 1)].view(windows, WINDOW - 1, -1)[:, WINDOW // 2 - 1 :].flatten(0, 1)


@pytest.mark.parametrize(
    ("case", "how", "gate"),
    [("tiny-v3", {"dtype": torch.bfloat16}, BF16), ("tiny-v3-fp8", {"fp8": True}, FP8)],
)
def test_engine(case, how, gate, shards, windows, float32):
    actual = engine_predictions(shards(case, 1), windows[:2], **how)
    assert_within(gate, actual, second_halves(float32, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "fp8", "gate"), [("tiny-v3", False, BF16), ("tiny-v3-fp8", True, FP8)])
def test_engine_gpu(case, fp8, gate, shards, windows, float32):
    """By the fused kernels and graphs, five windows in one batch."""
    actual = engine_predictions(shards(case, 1), windows[:5], "cuda", fp8=fp8)
    assert_within(gate, actual, second_halves(float32, 5))


@pytest.mark.gpu
def test_engine_gpu_float32(shards, windows, float32):
    """Without kernels and graphs the engine on a GPU is the simple path's equal."""
    actual = engine_predictions(shards("tiny-v3", 1), windows[:2], "cuda", dtype=torch.float32)
    expected = second_halves(float32, 2)
    assert float((expected.exp() * (expected - actual)).sum(dim=-1).mean()) <= 1e-7
