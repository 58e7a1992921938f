"""The conversation at a terminal: rank 0 reads and prints, the other ranks wait in the control group.

``/clear`` forgets the conversation, ``/exit`` or Ctrl-D ends it.
"""

from collections.abc import Callable
from contextlib import suppress

from model.errors import InputError
from model.generation import LanguageModel, check_prompts, generate
from model.prompts import Messages, Tokenizer
from model.sampling import Sampling

PROMPT = ">>> "


def chat(model: LanguageModel, tokenizer: Tokenizer | None, *, max_new_tokens: int, sampling: Sampling) -> None:
    """Talk until rank 0's person ends it. Every rank calls it; ``tokenizer`` is None on all but rank 0."""
    generator = sampling.generator(model.device)

    def reply(ids: list[int], eos: frozenset[int], on_token: Callable[[int, int], None] | None = None) -> list[int]:
        return generate(
            model,
            [ids],
            max_new_tokens=max_new_tokens,
            eos=eos,
            sampling=sampling,
            generator=generator,
            on_token=on_token,
        )[0]

    if tokenizer is None:
        while (turn := model.topology.broadcast_object(None)) is not None:
            reply(*turn)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives ``input`` line editing and a history where it is there)
    history: Messages = []
    while (line := _read_line()) is not None:
        if line == "/clear":
            history = []
        elif line:
            history.append({"role": "user", "content": line})
            try:
                ids = tokenizer.encode(history)
                check_prompts([ids], max_new_tokens, model.args)
            except InputError as error:
                history.pop()
                print(*error.problems, "(/clear starts anew)", sep="\n")
                continue
            model.topology.broadcast_object((ids, tokenizer.eos))
            answer = reply(ids, tokenizer.eos, _Printer(tokenizer))
            print()
            history.append({"role": "assistant", "content": tokenizer.decode(answer)})
    model.topology.broadcast_object(None)


def _read_line() -> str | None:
    """The next line without surrounding blanks, or None at the end."""
    try:
        line = input(PROMPT).strip()
    except EOFError:
        print()
        return None
    return None if line == "/exit" else line


class _Printer:
    """Prints a reply as it comes, holding back what a later token may still change (half a character)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.printed = ""

    def __call__(self, _prompt: int, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text
