"""The commands of docs/operating.md, so that what stands there is what is run."""

import re
from dataclasses import dataclass

from tests.integration.processes import REPOSITORY

FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
EXPORTED = re.compile(r"(?:^export|(?<=\S) )\s*(?P<name>[A-Z_]+)=", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block; one that keeps running has a terminal of its own."""

    text: str
    keeps_running: bool

    @property
    def command(self) -> list[str]:
        """What runs it, to its end or as long as it keeps running."""
        return ["bash", "-euo", "pipefail", "-c", f"exec {self.text}" if self.keeps_running else self.text]


def first_section() -> str:
    """All of `From nothing to a scheduled pipeline`."""
    text = (REPOSITORY / "docs" / "operating.md").read_text()
    return re.split(r"^## ", text, flags=re.MULTILINE)[1]


def blocks() -> list[Block]:
    """The section's ``sh`` blocks, in order."""
    found = [(fence["kind"], fence["text"]) for fence in FENCE.finditer(first_section())]
    return [Block(text, kind == "sh keeps-running") for kind, text in found if kind.startswith("sh")]


def exported() -> set[str]:
    """Names of the variables that its first block sets."""
    fence = FENCE.search(first_section())
    assert fence
    return set(EXPORTED.findall(fence["text"]))
