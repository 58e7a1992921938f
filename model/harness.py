"""The command ``python -m model.harness CKPT … -- ARGUMENTS``: lm-evaluation-harness on a checkpoint's own ranks.

What stands after ``--`` is the harness's own command line (``lm_eval run``) but for the model:
``python -m model.harness /data/v3-mp8 -- --tasks mmlu --num_fewshot 5 --output_path results``.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from model.checkpoint.manifest import Manifest
from model.errors import InputError
from model.evaluation.teamwork import assist
from model.launch import run_command
from model.options import add_model_options, load_as_asked, positive
from model.prompts import eos_ids, load_tokens
from model.ranks import agree
from model.topology import Topology

MODULE = "model.harness"
NAME = "shardflow"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 failed, 2 refused."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:end])
    work = partial(_work, options, arguments[end + 1 :])
    return run_command(MODULE, arguments, options.checkpoint, work, options.device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Run lm-evaluation-harness on a checkpoint.",
        epilog="What stands after -- are arguments of `lm_eval run`, such as --tasks.",
    )
    add_model_options(parser)
    parser.add_argument("--batch", type=positive, default=4, metavar="N", help="requests computed at once (default 4)")
    return parser


def _work(
    options: argparse.Namespace,
    arguments: Sequence[str],
    manifest: Manifest,
    topology: Topology,
    device: torch.device,
) -> None:
    """Rank 0 runs the harness, the other ranks compute along."""
    agree(topology, lambda: None if topology.rank else _check_installed())
    model = load_as_asked(options, manifest, topology, device)
    if topology.rank != 0:
        assist(model)
        return
    from model.evaluation.harness import ShardflowLM

    tokens = load_tokens(options.checkpoint, trust_remote_code=options.trust_remote_code)
    eos = eos_ids(options.checkpoint) or frozenset({tokens.eos_token_id})
    lm = ShardflowLM(model, tokens, eos, options.batch)
    _run_harness(lm, arguments)
    lm.close()


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise InputError("lm-evaluation-harness is not installed; run: pip install 'shardflow[eval]'") from error


def _run_harness(lm: Any, arguments: Sequence[str]) -> None:
    """The harness's command line with ``lm`` as its only model."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import setup_logging

    class Loaded(type(lm)):  # type: ignore[misc]
        """Stands for the model that is there already."""

        @classmethod
        def create_from_arg_string(cls, *_: Any, **__: Any) -> Any:
            return lm

        create_from_arg_obj = create_from_arg_string

    setup_logging()
    model_registry.register(NAME, target=Loaded)
    sys.argv = ["lm_eval", "run", "--model", NAME, *arguments]
    cli = HarnessCLI()
    cli.execute(cli.parse_args())


if __name__ == "__main__":
    sys.exit(main())
