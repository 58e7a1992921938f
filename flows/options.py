"""Arguments and options that several verbs of the command share."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def parse_size(text: str) -> int:
    """Bytes of a size such as 2GiB, 500MB or 4096."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is not a size such as 2GiB") from error


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A local directory, or a hub id (owner/name).")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must not exist, or be finished.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="A directory with shards and manifest.json.")]
Mp = Annotated[int, typer.Option("--mp", min=1, help="Model-parallel size: the number of shards.")]
Weights = Annotated[
    Literal["bf16", "fp8"] | None, typer.Option(help="What the shards hold; default: what the source holds.")
]
Mtp = Annotated[Literal["drop", "keep"], typer.Option(help="What happens to multi-token-prediction layers.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id; default main.")]
Downloads = Annotated[Path | None, typer.Option(help="Where downloads of hub ids go; default: the user's cache.")]
MaxMemory = Annotated[int, typer.Option(parser=parse_size, metavar="SIZE", help="Memory for tensors, such as 2GiB.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Files written at a time; default: one a core.")]
