"""One rank of the parity tests: ``python -m tests.model.parity_ranks PLAN OUT``, started for mp ranks at once.

PLAN is a JSON list of {checkpoint, tokens, prompts}; OUT becomes a safetensors file of all logits, and beside it
a JSON file of all completions, by checkpoint directory and form of attention.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model.attention import ATTENTION
from model.checkpoint.manifest import read_manifest
from model.generation import generate
from model.load import load_model
from model.ranks import end_with_parent, join
from model.sampling import Sampling
from model.topology import Topology
from model.transformer import Transformer
from tests.model.oracle import NEW_TOKENS

PREFILL = 17
FEW = 8
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_p=0.9, seed=5)


def run(plan: list[dict[str, Any]], topology: Topology) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Logits and completions of every case in both forms, under the keys ``<case>/<form>/<what>``."""
    logits: dict[str, torch.Tensor] = {}
    completions: dict[str, Any] = {}
    device = torch.device("cpu")
    for case in plan:
        directory = Path(case["checkpoint"])
        tokens = torch.tensor(case["tokens"])
        for form in ATTENTION:
            model = load_model(directory, read_manifest(directory), topology, device, attention=form)
            key = f"{case['name']}/{form}"
            logits[f"{key}/at-once"] = model(tokens, 0, model.new_cache(*tokens.shape), all_positions=True)
            logits[f"{key}/by-step"] = by_step(model, tokens)
            complete = partial(completed, model)
            completions[f"{key}/together"] = complete(case["prompts"])
            if case["name"] == "tiny-v3":
                completions[f"{key}/drawn"] = complete(case["prompts"], DRAWN, new_tokens=FEW)
            if topology.size == 1:
                completions[f"{key}/alone"] = [complete([prompt], new_tokens=FEW)[0] for prompt in case["prompts"]]
    return logits, completions


def by_step(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after each token: a first part at once, a second part at once after it, then one by one."""
    batch, length = tokens.shape
    cache = model.new_cache(batch + 1, length + 3)  # a larger cache than is needed
    ends = [PREFILL, 2 * PREFILL, *range(2 * PREFILL + 1, length + 1)]
    parts = [
        model(tokens[:, start:end], start, cache, all_positions=True)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return torch.cat(parts, dim=1)


def completed(
    model: Transformer, prompts: list[list[int]], sampling: Sampling = GREEDY, new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    generator = sampling.generator(model.device)
    completions = generate(model, prompts, max_new_tokens=new_tokens, eos=(), sampling=sampling, generator=generator)
    everywhere = model.topology.all_gather_object(completions)
    assert everywhere == [completions] * model.topology.size, "ranks diverge"
    return completions


def main(plan_file: str, out: str, mp: int) -> None:
    end_with_parent()
    plan = json.loads(Path(plan_file).read_text())
    with join(mp, torch.device("cpu")) as topology:
        logits, completions = run(plan, topology)
        if topology.rank == 0:
            save_file({name: tensor.contiguous() for name, tensor in logits.items()}, out)
            Path(out).with_suffix(".json").write_text(json.dumps(completions))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
