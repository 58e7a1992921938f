"""A Hugging Face directory as a reference: computed by transformers, which shares no code with this project's model."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from model.checkpoint.dequantize import dequantize
from model.checkpoint.source import read_json
from model.errors import InputError
from model.evaluation.windows import Window


@contextmanager
def loadable(source: Path) -> Iterator[Path]:
    """``source``, or where it holds FP8, a temporary BF16 copy of it: ``float32(w) * scale``, rounded once to BF16.

    transformers' own FP8 path needs a GPU and computes with FP8 activations, which is no reference.
    """
    if "quantization_config" not in read_json(source / "config.json"):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="shardflow-") as scratch:
        dequantize(source, Path(scratch) / source.resolve().name)
        yield Path(scratch) / source.resolve().name


def load_hf(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model in ``directory``. Raises ``InputError`` where its weights are not all there."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{directory}: transformers cannot load it: {' '.join(str(error).split())}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise InputError(f"{directory}: transformers misses {len(missing)} weights, the first of them {missing[0]!r}")
    return model.eval().to(device)


@torch.inference_mode()
def hf_window_logits(
    model: Any, ids: Sequence[int], windows: Sequence[Window]
) -> Iterator[tuple[Window, torch.Tensor]]:
    """``scoring.window_logits`` of a transformers model, one window at a time, float32."""
    for window in windows:
        tokens = torch.tensor([ids[window.start : window.end]], device=model.device)
        rows = model(tokens, use_cache=False).logits[0].float()
        yield window, rows[window.scored - 1 - window.start : window.end - 1 - window.start]
