"""The command as a person types it: what it prints where, and with which status it ends."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flows import cli
from model.conflicts import say_conflict
from tests.checkpoints import copy_checkpoint, edit_json, edit_tensor, tree_bytes
from tests.hub_server import HubServer


@pytest.fixture
def shardflow(monkeypatch, capsys):
    """The command's entry point in this process: a new one for each would spend minutes on imports."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=told.out, stderr=told.err)

    return run


def test_plan_in_text_and_json(shardflow, tiny):
    told = shardflow("plan", tiny, "--mp", "2", "--weights", "bf16")
    assert told.returncode == 0
    assert "model1-mp2.safetensors" in told.stdout
    assert "legal mp: 1, 2, 4, 8" in told.stdout
    plan = json.loads(shardflow("plan", tiny, "--mp", "4", "--json").stdout)
    assert (plan["weights"], plan["mp"], plan["legal_mp"]) == ("fp8", 4, [1, 2, 4])
    assert [file["name"] for file in plan["files"]] == [f"model{rank}-mp4.safetensors" for rank in range(4)]
    assert plan["dropped"][0]["rule"] == "mtp_layers"


def test_convert_verify_and_convert_again(shardflow, tiny, tmp_path):
    out = tmp_path / "out"
    done = shardflow("convert", tiny, out, "--mp", "2", "--weights", "bf16")
    assert (done.returncode, done.stdout) == (0, "")
    assert "finished, mp 2, bf16 weights" in done.stderr
    plan = json.loads(shardflow("plan", tiny, "--mp", "2", "--weights", "bf16", "--json").stdout)
    assert {file["name"]: file["size"] for file in plan["files"]} == {
        path.name: path.stat().st_size for path in out.glob("*.safetensors")
    }
    again = shardflow("convert", tiny, out, "--mp", "2", "--weights", "bf16")
    assert again.returncode == 0
    assert "was already finished" in again.stderr
    proven = shardflow("verify", out, "--source", tiny)
    assert proven.returncode == 0
    assert proven.stdout.startswith("verified: 139 source tensors")
    (out / "model0-mp2.safetensors").write_bytes(b"")
    broken = shardflow("verify", out)
    assert broken.returncode == 1
    assert "model0-mp2.safetensors: expected" in broken.stderr


def test_dequantize(shardflow, tiny, tmp_path):
    done = shardflow("dequantize", tiny, tmp_path / "out", "--max-memory", "64MiB", "--workers", "1")
    assert done.returncode == 0
    assert (tmp_path / "out" / "dequantized.json").exists()
    refused = shardflow("dequantize", tmp_path / "out", tmp_path / "again")
    assert refused.returncode == 2
    assert "holds no FP8 weights" in refused.stderr
    assert not (tmp_path / "again").exists()


def damaged(tiny, tmp_path, case):
    source = copy_checkpoint(tiny, tmp_path / "source")
    if case == "scale":
        edit_tensor(source, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", None)
    elif case == "truncated":
        os.truncate(source / "model-00004-of-000007.safetensors", 1_000_000)
    else:
        (source / "config.json").write_text(
            json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096})
        )
    return source


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        ("scale", "tensor 'model.layers.1.mlp.experts.3.up_proj.weight' is F8_E4M3 but its scale"),
        ("truncated", "model-00004-of-000007.safetensors: is truncated"),
        ("foreign", "model_type 'llama' (LlamaForCausalLM) is a Llama model"),
    ],
)
def test_a_bad_source_costs_nothing(shardflow, tiny, tmp_path, case, culprit):
    source = damaged(tiny, tmp_path, case)
    for verb in (("convert", source, tmp_path / "out", "--mp", "2"), ("run", source, tmp_path / "out", "--mp", "2")):
        refused = shardflow(*verb)
        assert refused.returncode == 2
        assert refused.stdout == ""
        lines = refused.stderr.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert culprit in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "TINY", "OUT", "--mp", "8"), "mp = 8 is not legal for fp8 shards"),
        (("convert", "TINY", "OUT", "--mp", "0"), "greater than or equal to 1"),
        (("convert", "TINY", "OUT", "--mp", "2", "--max-memory", "lots"), "'lots' is not a size such as 2GiB"),
        (("convert", "nowhere", "OUT", "--mp", "2"), "nowhere: is neither a directory nor a hub id"),
        (
            ("convert", "TINY", "OUT", "--mp", "2", "--revision", "main"),
            "is a local directory, which has no revisions",
        ),
        (("verify", "OUT"), "holds no manifest.json, so it is no checkpoint"),
        (("generate", "OUT", "--prompt", "x"), "holds no manifest.json, so it is no checkpoint"),
        (("generate", "OUT"), "one of the arguments --prompt --input-file --interactive is required"),
        (("adopt", "OUT", "--config", "TINY/config.json"), "to adopt"),
        (
            ("run", "TINY", "OUT", "--mp", "2", "--weights", "fp8", "--dequantize", "fused"),
            "FP8 shards are not dequantised",
        ),
    ],
)
def test_refusals_have_status_2_and_say_why(shardflow, tiny, tmp_path, arguments, message):
    out = tmp_path / "out"
    refused = shardflow(*(a.replace("TINY", str(tiny)).replace("OUT", str(out)) for a in arguments))
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not out.exists()


def test_a_token_opens_the_hub_and_is_written_nowhere(tiny, tmp_path):
    """In a process of its own: huggingface_hub reads its endpoint when it is imported."""
    with HubServer() as hub:
        hub.add("org/tiny", tiny, gated=True)
        environment = {"HF_TOKEN": "hf_secret", "HF_ENDPOINT": hub.endpoint, "HOME": str(tmp_path / "home")}

        def run(repo):
            return subprocess.run(
                [sys.executable, "-m", "flows.cli", "convert", repo, tmp_path / "out", "--mp", "1"],
                capture_output=True, text=True, timeout=240, check=False,
                env={**os.environ, **environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            )  # fmt: skip

        done, refused = run("org/tiny"), run("org/none")
        assert {call.authorization for call in hub.log if call.name.endswith(".safetensors")} == {"Bearer hf_secret"}
    assert done.returncode == 0
    assert refused.returncode == 2
    assert "no such model repository" in refused.stderr
    told = [text.encode() for run in (done, refused) for text in (run.stdout, run.stderr)]
    assert not any(b"hf_secret" in data for data in (*told, *tree_bytes(tmp_path).values()))
    assert b"org/tiny" in (tmp_path / "out" / "manifest.json").read_bytes()


def test_the_other_kernels_distribution_is_named(shardflow, tiny, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.17.0")
    say_conflict.cache_clear()  # it speaks once in a process, and other tests share this one
    told = shardflow("plan", tiny, "--mp", "1")
    say_conflict.cache_clear()
    assert told.returncode == 0
    assert "the distribution 'kernels' 0.17.0 is installed beside this project" in told.stderr


def test_other_model_types_are_named(shardflow, tiny, tmp_path):
    source = copy_checkpoint(tiny, tmp_path / "source")
    edit_json(source / "config.json", model_type="deepseek_v32")
    refused = shardflow("plan", source, "--mp", "2")
    assert refused.returncode == 2
    assert "is DeepSeek-V3.2" in refused.stderr
