"""The command-line options that say on which tokens a model is evaluated, shared by evaluation and reference."""

import argparse
from pathlib import Path

from model.args import ModelArgs
from model.evaluation.text import Text, read_text
from model.options import positive

AGAINST_TOKENS = 4096
"""Tokens on which a model is held against a reference: 2.1 GB of logits for a vocabulary of 129,280."""


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add text, windows and batch."""
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: a bundled passage of a play)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="evaluate the text's first N tokens alone")
    parser.add_argument("--window", type=positive, metavar="N", help="tokens seen at once (default: context, ≤2048)")
    parser.add_argument("--stride", type=positive, metavar="N", help="tokens between windows (default: window - 1)")
    parser.add_argument("--batch", type=positive, default=4, metavar="N", help="windows computed at once (default 4)")


def text_as_asked(options: argparse.Namespace, args: ModelArgs) -> Text:
    """The text by the options, in the tokens of the checkpoint. Raises ``InputError`` as ``read_text`` does."""
    return read_text(
        options.text,
        options.checkpoint,
        args,
        max_tokens=options.max_tokens,
        trust_remote_code=options.trust_remote_code,
    )
