"""Parameters that several flows share, each with its bounds and what the form says of it."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field

Mp = Annotated[int, Field(description="Model-parallel size: into how many shards.", ge=1, le=1024)]
Mtp = Annotated[
    Literal["drop", "keep"], Field(description="Leave the multi-token-prediction layers out, or keep them.")
]
MaxMemory = Annotated[ByteSize, Field(description="Memory for tensors, such as 2GiB, whatever the model's size.", gt=0)]
Workers = Annotated[int, Field(description="Files written at a time; default: one a core.", ge=1, le=256)]
TaskRunner = Annotated[
    Literal["threads", "processes", "ray"],
    Field(description="Where files are written: in threads, in processes, or on a Ray cluster's machines."),
]
RayAddress = Annotated[
    str | None,
    Field(description="Address of the Ray cluster, such as ray://head:10001; empty: a local one is started."),
]
GpuLimit = Annotated[
    str | None,
    Field(
        description="Name of the global concurrency limit that warm-up and reply take, such as gpu; it must exist. "
        "Empty: none is taken."
    ),
]
WarmUpTimeout = Annotated[float, Field(description="Hard limit on warm-up and reply, in seconds.", gt=0)]
