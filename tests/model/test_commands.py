"""``python -m model.generate`` and ``python -m model.warmup`` as a person runs them: output, errors, exit status."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from model import generate, warmup
from model.prompts import Tokenizer
from tests.checkpoints import edit_file
from tests.model.oracle import greedy_reply

LINE = "Who's there?"
BREVITY = ["--max-new-tokens", "24", "--device", "cpu"]


def run(*arguments: object, module: str = "model.generate", launcher: tuple[str, ...] = (), **options):
    """The command in a process of its own."""
    command = [sys.executable, *launcher, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, **options)


def edit_json(path, edit) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def errors_of(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def reply(oracle_checkpoint) -> str:
    """What transformers answers to ``LINE``, greedily."""
    return greedy_reply(oracle_checkpoint, LINE, 24)


def test_one_prompt_prints_the_reply_and_nothing_else(shards, reply, capsys):
    assert generate.main([str(shards("tiny-v3", 1)), "--prompt", LINE, *BREVITY]) == 0
    assert capsys.readouterr().out == f"{reply}\n"


def test_own_ranks_print_the_same_reply_once(shards, reply):
    done = run(shards("tiny-v3-fp8", 2), "--prompt", LINE, *BREVITY)
    assert (done.returncode, done.stdout, errors_of(done.stderr)) == (0, f"{reply}\n", [])


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


def test_torchrun_prints_the_same_reply_once(shards, reply):
    done = run(shards("tiny-v3", 2), "--prompt", LINE, *BREVITY, launcher=(*TORCHRUN, "2"))
    assert (done.returncode, done.stdout) == (0, f"{reply}\n")


def test_torchrun_prints_a_refused_option_once(shards):
    done = run(shards("tiny-v3", 2), "--prompt", "x", "--temperature", "nan", *BREVITY, launcher=(*TORCHRUN, "2"))
    assert (done.returncode, done.stdout) == (1, "")
    assert errors_of(done.stderr) == ["error: temperature nan is not a finite number"]


def test_torchrun_with_the_wrong_number_of_ranks_is_answered_once(shards):
    checkpoint = shards("tiny-v3", 2)
    done = run(checkpoint, "--prompt", "x", launcher=(*TORCHRUN, "3"))
    assert done.returncode == 1  # torchrun's own status for any failure
    assert done.stdout == ""
    assert errors_of(done.stderr) == [
        f"error: {checkpoint}: holds shards for 2 ranks (mp = 2), but 3 ranks were started; start it with: "
        f"torchrun --nproc-per-node 2 -m model.generate {checkpoint} --prompt x"
    ]


def test_several_prompts_are_printed_with_their_replies(shards, reply, capsys):
    arguments = ["--prompt", LINE, "--prompt", "Farewell.", "--batch-size", "1", *BREVITY]
    assert generate.main([str(shards("tiny-v3", 1)), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Prompt: {LINE}\nReply: {reply}\n\nPrompt: Farewell.\nReply: ")
    assert out.count("Prompt: ") == 2


@pytest.mark.parametrize("batch_size", ["1", "2", "8"])
def test_a_file_is_answered_in_its_order_whatever_the_batches(shards, reply, capsys, tmp_path, batch_size):
    file = tmp_path / "prompts.jsonl"
    lines = ["Farewell.", LINE, "What says my lord of the matter that we spoke of?"]
    file.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    command = [str(shards("tiny-v3", 1)), "--input-file", str(file), "--batch-size", batch_size, *BREVITY]
    assert generate.main(command) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["messages"][0]["content"] for entry in entries] == lines
    assert entries[1]["reply"] == reply


def test_draws_for_a_file_are_the_same_on_two_ranks(shards, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Farewell.\nWho's there?\nWhat says my lord?\nSpeak!\nStand, and unfold yourself to me.\n")
    options = ["--input-file", file, "--temperature", "0.8", "--seed", "3", "--batch-size", "2", *BREVITY]
    options += ["--dtype", "float32"]
    assert generate.main([str(shards("tiny-v3", 1)), *map(str, options)]) == 0
    alone = capsys.readouterr().out
    assert alone.count("Prompt: ") == 5
    done = run(shards("tiny-v3", 2), *options)
    assert (done.returncode, done.stdout) == (0, alone)


def test_draws_are_repeatable_by_seed(shards, capsys):
    command = [str(shards("tiny-v3", 1)), "--prompt", LINE, "--temperature", "1.5", *BREVITY]

    def drawn(seed: str) -> str:
        assert generate.main([*command, "--seed", seed]) == 0
        return capsys.readouterr().out

    assert drawn("1") == drawn("1") != drawn("2")


def test_conversation_on_several_ranks(shards, reply):
    """A line, a cleared history, a prompt that is too long, the line again, the end of the input."""
    lines = [LINE, "/clear", "blood " * 600, "", LINE]
    done = run(shards("tiny-v3", 2), "--interactive", *BREVITY, input="\n".join(lines) + "\n")
    assert (done.returncode, errors_of(done.stderr)) == (0, [])
    assert "Traceback" not in done.stderr
    replies = done.stdout.split(">>> ")
    assert replies[0] == ""
    assert replies[1] == f"{reply}\n"
    assert replies[2] == ""
    assert "leave no room in the model's context of 512" in replies[3]
    assert replies[4:] == ["", f"{reply}\n", "\n"]


def test_a_line_that_the_chat_template_refuses_does_not_end_the_conversation(shards, reply, capsys, monkeypatch):
    lines = iter(["refuse", LINE, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    encode = Tokenizer.encode

    def refusing(self, messages):
        if "refuse" in messages[-1]["content"]:
            self.tokens.chat_template, kept = "{{ raise_exception('not this') }}", self.tokens.chat_template
            try:
                return encode(self, messages)
            finally:
                self.tokens.chat_template = kept
        return encode(self, messages)

    monkeypatch.setattr(Tokenizer, "encode", refusing)
    assert generate.main([str(shards("tiny-v3", 1)), "--interactive", *BREVITY]) == 0
    out = capsys.readouterr().out
    assert out == f"the chat template cannot be used for it: not this\n(/clear starts anew)\n{reply}\n"


def test_history_is_part_of_the_next_prompt(shards, capsys, monkeypatch, oracle_checkpoint):
    lines = iter([LINE, "Stand, and unfold yourself.", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert generate.main([str(shards("tiny-v3", 1)), "--interactive", *BREVITY]) == 0
    first = greedy_reply(oracle_checkpoint, LINE, 24)
    second = greedy_reply(oracle_checkpoint, "Stand, and unfold yourself.", 24, earlier=(LINE, first))
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert next(lines) == "never read"


@pytest.mark.parametrize(
    ("send", "number", "status"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
    ids=["Ctrl-C at the terminal", "Ctrl-C for the launcher alone", "SIGTERM for the launcher alone"],
)
def test_a_signal_ends_a_conversation_without_a_word(shards, tmp_path, send, number, status):
    command = [sys.executable, "-m", "model.generate", str(shards("tiny-v3", 2)), "--interactive", *BREVITY]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
    assert os.read(process.stdout.fileno(), 100) == b">>> "
    send(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert b"Traceback" not in stderr
    assert not list(tmp_path.glob("shardflow-*"))
    deadline = time.monotonic() + 20
    while any_left(process.pid):
        assert time.monotonic() < deadline, "a rank outlived the signal"
        time.sleep(0.05)


def any_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_bad_shard_of_one_rank_ends_all_with_status_2(shards, tmp_path):
    checkpoint = tmp_path / "broken"
    shutil.copytree(shards("tiny-v3", 2), checkpoint)
    edit_file(checkpoint / "model1-mp2.safetensors", {"norm.weight": None}, index=False)
    done = run(checkpoint, "--prompt", "x", *BREVITY)
    assert done.returncode == 2
    assert done.stdout == ""
    shard = checkpoint / "model1-mp2.safetensors"
    assert errors_of(done.stderr) == [
        f"error: {shard}: tensor 'norm.weight' [256] is missing; convert again for this config"
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--prompt", "x", "--temperature", "-1"], "temperature -1.0 is below 0"),
        (["--prompt", "x", "--fp8", "on"], "holds BF16 weights; the FP8 product takes FP8 in 128x128 blocks"),
        (["--prompt", "x", "--device", "cuda"], "a GPU for each of this host's ranks (1), and torch finds 0"),
        (["--prompt", "blood " * 600], "prompt 1: its 605 tokens leave no room"),
        (["--input-file", "nowhere.txt"], "nowhere.txt: cannot be read"),
    ],
)
def test_what_is_refused_ends_with_status_2_and_one_line(shards, capsys, monkeypatch, options, problem):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert generate.main([str(shards("tiny-v3", 1)), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = errors_of(captured.err)
    assert problem in line


def test_a_directory_without_a_manifest_is_refused(tmp_path, capsys):
    assert generate.main([str(tmp_path), "--prompt", "x"]) == 2
    assert errors_of(capsys.readouterr().err)[0].startswith(f"error: {tmp_path}: holds no manifest.json")


@pytest.mark.parametrize("options", [[], ["--prompt", "x", "--interactive"], ["--prompt", "x", "--batch-size", "0"]])
def test_impossible_options_end_with_status_2(options, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["ckpt", *options])
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_warm_up_reports_every_rank(shards):
    done = run(shards("tiny-v3-fp8", 2), "--fp8", "on", "--device", "cpu", module="model.warmup")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mp"] == 2
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        assert rank["tokens"] == report["ranks"][0]["tokens"]
        assert len(rank["tokens"]) == 2
        assert (rank["device"], rank["dtype"], rank["fp8"], rank["finite"]) == ("cpu", "float32", True, True)
        assert rank["load_s"] > 0
        assert rank["warmup_s"] > 0


def test_warm_up_does_what_the_model_says(shards, capsys, oracle_checkpoint):
    from transformers import AutoModelForCausalLM

    assert warmup.main([str(shards("tiny-v3", 1)), "--device", "cpu"]) == 0
    model = AutoModelForCausalLM.from_pretrained(oracle_checkpoint, dtype=torch.float32)
    ids = model.generate(torch.arange(8)[None], max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert json.loads(capsys.readouterr().out)["ranks"][0]["tokens"] == ids[0, 8:].tolist()


def test_warm_up_of_a_model_with_hardly_any_context_is_refused_once(shards, tmp_path):
    checkpoint = tmp_path / "short"
    shutil.copytree(shards("tiny-v3", 2), checkpoint)
    edit_json(checkpoint / "manifest.json", lambda manifest: manifest["args"].update(max_seq_len=2))
    done = run(checkpoint, "--device", "cpu", module="model.warmup")
    assert (done.returncode, done.stdout) == (2, "")
    assert errors_of(done.stderr) == [
        "error: the model's context of 2 is too short for a warm-up, a token and 2 new ones"
    ]


def test_the_shortest_context_of_a_warm_up(shards, capsys, tmp_path):
    checkpoint = tmp_path / "short"
    shutil.copytree(shards("tiny-v3", 1), checkpoint)
    edit_json(checkpoint / "manifest.json", lambda manifest: manifest["args"].update(max_seq_len=3))
    assert warmup.main([str(checkpoint), "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"][0]["tokens"]) == 2


def test_logits_that_are_not_finite_name_the_rank_and_the_weight(shards, tmp_path):
    checkpoint = tmp_path / "damaged"
    shutil.copytree(shards("tiny-v3", 2), checkpoint)
    shard = checkpoint / "model1-mp2.safetensors"
    weight = load_file(shard)["layers.1.attn.wo.weight"]
    weight[3, 5] = torch.nan
    edit_file(shard, {"layers.1.attn.wo.weight": weight}, index=False)
    done = run(checkpoint, "--device", "cpu", module="model.warmup")
    assert done.returncode == 1
    assert done.stdout == ""
    assert errors_of(done.stderr) == [
        "error: rank 0: logits are not finite, though all weights in model0-mp2.safetensors are",
        "error: rank 1: logits are not finite; model1-mp2.safetensors: 'layers.1.attn.wo.weight' is not",
    ]
