"""The command ``python -m model.generate CKPT``: replies to prompts, to a file of prompts, or at a terminal.

It starts its own ranks, or is one of ``torchrun --nproc-per-node N -m model.generate CKPT …``. With one ``--prompt``,
standard output is the reply and nothing else. Prompts given at once run on ``model.engine``; a conversation at the
terminal, and the naive form of attention, on the simple path, ``model.generation.generate``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from model.args import ModelArgs
from model.chat import chat
from model.checkpoint.manifest import Manifest
from model.engine.engine import Limits
from model.engine.generation import generate as generate_on_engine
from model.generation import check_prompts, generate
from model.launch import run_command
from model.options import add_model_options, engine_as_asked, load_as_asked, positive
from model.prompts import Messages, Tokenizer, from_user, read_prompts
from model.ranks import agree
from model.sampling import Sampling
from model.topology import Topology

MODULE = "model.generate"


def main(arguments: Sequence[str] | None = None, program: str = f"python -m {MODULE}") -> int:
    """Run the command and return its exit status: 0 done, 1 failed, 2 refused. ``program`` is its name in the help."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(program).parse_args(arguments)
    return run_command(MODULE, arguments, options.checkpoint, partial(_work, options), options.device)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Generate replies with a checkpoint.")
    add_model_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    source.add_argument("--input-file", type=Path, metavar="F", help="a prompt a line, or JSON lines (.jsonl)")
    source.add_argument("--interactive", action="store_true", help="talk at the terminal; /clear, /exit")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the K likeliest tokens; 0 (default): from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of mass P (default 1)")
    parser.add_argument("--seed", type=int, help="makes draws repeatable")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="longest reply (default 256)")
    parser.add_argument("--batch-size", type=positive, default=8, help="prompts at a time (default 8)")
    return parser


@dataclass(frozen=True)
class Asked:
    """What rank 0, which alone handles text, has been asked. Interactively, no conversations are there yet."""

    tokenizer: Tokenizer
    conversations: list[Messages]
    prompts: list[list[int]]


def _work(options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device) -> None:
    """What each rank does. Whatever can be refused is found before the weights are loaded."""
    sampling = agree(topology, lambda: _sampling(options))
    asked = agree(topology, lambda: _asked(options, manifest.args) if topology.rank == 0 else None)
    if options.interactive:
        model = load_as_asked(options, manifest, topology, device)
        chat(model, asked.tokenizer if asked else None, max_new_tokens=options.max_new_tokens, sampling=sampling)
        return
    prompts, eos = topology.broadcast_object(asked and (asked.prompts, asked.tokenizer.eos))
    reply_to = _replier(options, manifest, topology, device, prompts)
    how = {"max_new_tokens": options.max_new_tokens, "eos": eos, "sampling": sampling}
    how["generator"] = sampling.generator(device)
    for start in range(0, len(prompts), options.batch_size):
        replies = reply_to(prompts[start : start + options.batch_size], **how)
        if asked is not None:
            for conversation, reply in zip(asked.conversations[start:], replies, strict=False):
                print(_shown(options, conversation, asked.tokenizer.decode(reply)), flush=True)


def _replier(
    options: argparse.Namespace,
    manifest: Manifest,
    topology: Topology,
    device: torch.device,
    prompts: list[list[int]],
) -> Callable[..., list[list[int]]]:
    """What completes a batch of prompts: the engine, with room for the longest of ``prompts``, or the simple path."""
    if options.attention != "absorbed":
        return partial(generate, load_as_asked(options, manifest, topology, device))
    longest = max(map(len, prompts)) + options.max_new_tokens
    limits = Limits(min(options.batch_size, len(prompts)), min(longest, manifest.args.max_seq_len))
    return partial(generate_on_engine, engine_as_asked(options, manifest, topology, device, limits))


def _sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed)


def _asked(options: argparse.Namespace, args: ModelArgs) -> Asked:
    tokenizer = Tokenizer.open(options.checkpoint, trust_remote_code=options.trust_remote_code)
    if options.interactive:
        return Asked(tokenizer, [], [])
    conversations = (
        read_prompts(options.input_file) if options.input_file else [from_user(text) for text in options.prompt]
    )
    prompts = tokenizer.encode_all(conversations)
    check_prompts(prompts, options.max_new_tokens, args)
    return Asked(tokenizer, conversations, prompts)


def _shown(options: argparse.Namespace, conversation: Messages, reply: str) -> str:
    """The reply alone for one ``--prompt``, a JSON line for JSON lines, else the prompt and its reply."""
    if options.prompt and len(options.prompt) == 1:
        return reply
    if options.input_file and options.input_file.suffix == ".jsonl":
        return json.dumps({"messages": conversation, "reply": reply}, ensure_ascii=False)
    return f"Prompt: {conversation[-1]['content']}\nReply: {reply}\n"


if __name__ == "__main__":
    sys.exit(main())
