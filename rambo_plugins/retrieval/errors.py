"""What ends the command with one line, and what with a traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import torch

_WORKERS = ("killed by signal", "exited unexpectedly", "shared memory", "No space left")
_LOST = ("Connection closed by peer", "Connection reset by peer")
_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class CannotGoOn(Exception):
    """Something that the user can mend: the text says what came, what was expected, and what to do."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Where arguments, files and data are looked at: ValueErrors and ImportErrors are words to the user."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise CannotGoOn(str(error)) from error


def line_of(error: BaseException) -> str | None:
    """The one line of an error that the user can mend; None of any other, which keeps its traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, CannotGoOn):
        return text
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{text}; what was finished is kept: make room, and start the same command again (without --fresh)"
        return text
    memory = isinstance(error, RuntimeError) and any(word in text for word in _MEMORY)
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or memory:
        return (
            f"out of memory: {text[:200]}; the last checkpoint is kept. Fewer --workers and another --device may go on "
            "from it; --chunk, a smaller --batch-size or --size and --amp bf16 make another run: name another --out, "
            "or add --fresh"
        )
    if isinstance(error, RuntimeError) and "DataLoader worker" in text and any(word in text for word in _WORKERS):
        return f"{text[-200:]}; the last checkpoint is kept: start again with fewer --workers, or 0"
    if isinstance(error, RuntimeError) and "device-side assert" in text:
        return (
            "a check on the GPU failed; the lines above say which, and NaN among the scores is training that diverged: "
            "the last checkpoint is kept, and a smaller --lr makes another run: name another --out, or add --fresh"
        )
    if isinstance(error, RuntimeError) and any(word in text for word in _LOST):
        return f"another process has ended without a word, for example killed for want of memory: {text[-200:]}"
    return None
