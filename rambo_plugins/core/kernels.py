"""Which kernel ranks a problem: ``compiled.py`` or ``counting.py`` on the CPU, ``sorting.py`` on other devices.

They give the same gradient to the last bit; the choice is by the measurements of ``benchmarks/speed.py``. Small
problems, and those where many items are relevant, are sorted where numba is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from types import ModuleType

from torch import Tensor

from rambo_plugins.core import counting, sorting
from rambo_plugins.core.sorting import Outcome, Problem


def rank_and_move(problem: Problem) -> Outcome:
    """What each kernel does, see ``sorting.py``, by the fastest of them."""
    return kernel_for(problem.scores, problem.relevance).rank_and_move(problem)


def kernel_for(scores: Tensor, relevance: Tensor) -> ModuleType:
    """The kernel for scores and relevance (Q, N); on the CPU alone it looks at how many are relevant."""
    if scores.device.type != "cpu":
        return sorting
    return compiled_kernel() or (counting if counting.is_faster(scores, relevance) else sorting)


@functools.cache
def compiled_kernel() -> ModuleType | None:
    """``compiled.py``, unless numba is missing or, with a warning, cannot work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        from rambo_plugins.core import compiled
    except (ImportError, RuntimeError) as error:  # a numpy that it does not know, no folder for its cache
        warnings.warn(f"numba is installed, but cannot be used, which makes rank losses slower: {error}", stacklevel=2)
        return None
    return compiled
