"""The text that a checkpoint is evaluated on, as token ids behind one BOS."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from model.args import ModelArgs
from model.checkpoint.storage import reading
from model.errors import InputError
from model.prompts import load_tokens

BUNDLED = Path(__file__).with_name("heldout.txt")
"""12,000 characters of Macbeth (characters 20,000 to 32,000 of the play), which tiny-v3 was not trained on."""


@dataclass(frozen=True)
class TextRecord:
    """Which text: file name, sha256 of its bytes, and how many of its bytes the evaluated tokens stand for."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Text:
    """Token ids, BOS first and no other special token, and the record of where they come from."""

    ids: list[int]
    record: TextRecord


def read_text(
    path: Path | None, checkpoint: Path, args: ModelArgs, *, max_tokens: int | None, trust_remote_code: bool = False
) -> Text:
    """The UTF-8 text in ``path`` (None: the bundled one) in the tokens of ``checkpoint``, ``max_tokens`` at most.

    Raises ``InputError`` where the file cannot be read, the tokenizer has no BOS, or an id is not of the vocabulary.
    """
    path = path or BUNDLED
    with reading(path):
        data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text: {error}") from error
    tokens = load_tokens(checkpoint, trust_remote_code=trust_remote_code)
    if tokens.bos_token_id is None:
        raise InputError(f"{checkpoint}: its tokenizer names no BOS token, with which an evaluated text begins")
    all_ids = tokens.encode(text, add_special_tokens=False, verbose=False)
    ids = all_ids[:max_tokens]
    if not ids:
        raise InputError(f"{path}: holds no token to predict")
    if max(ids) >= args.vocab_size:
        raise InputError(
            f"{checkpoint}: its tokenizer gives token id {max(ids)}, outside the model's vocabulary of "
            f"{args.vocab_size}; it belongs to another model"
        )
    covered = len(data) if len(ids) == len(all_ids) else len(tokens.decode(ids).encode())
    return Text([tokens.bos_token_id, *ids], TextRecord(path.name, hashlib.sha256(data).hexdigest(), covered))
