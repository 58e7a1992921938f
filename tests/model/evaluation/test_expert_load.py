import torch

from model.checkpoint.manifest import read_manifest
from model.evaluation.expert_load import counted_experts, expert_loads
from model.evaluation.scoring import window_logits
from model.evaluation.windows import plan_windows
from model.load import load_model
from model.topology import Topology


def test_the_choices_are_those_of_transformers(shards, oracle_checkpoint):
    from transformers import AutoModelForCausalLM

    directory = shards("tiny-v3", 1)
    model = load_model(directory, read_manifest(directory), Topology(), torch.device("cpu"))
    ids = torch.randint(2, 1536, (91,), generator=torch.Generator().manual_seed(3)).tolist()
    windows = plan_windows(len(ids), 41, 40)
    with counted_experts(model) as counts:
        list(window_logits(model, ids, windows, 2))
    loads = expert_loads(model, counts)
    list(window_logits(model, ids, windows, 2))
    assert expert_loads(model, counts) == loads, "counted outside of the block"
    assert [load.layer for load in loads] == [1, 2]

    theirs = AutoModelForCausalLM.from_pretrained(oracle_checkpoint, dtype=torch.float32).eval()
    for load in loads:
        chosen = []
        moe = theirs.model.layers[load.layer].mlp
        handle = moe.experts.register_forward_pre_hook(lambda _m, args, seen=chosen: seen.append(args[1].flatten()))
        with torch.inference_mode():
            for window in windows:
                theirs(torch.tensor([ids[window.start : window.end]]))
        handle.remove()
        assert load.counts == tuple(torch.bincount(torch.cat(chosen), minlength=16).tolist()), load.layer
        assert sum(load.counts) == 4 * sum(window.end - window.start for window in windows)
