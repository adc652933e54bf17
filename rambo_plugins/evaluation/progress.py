"""Progress bars of long work, which need tqdm only where they are shown."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(show: bool, what: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    if not show:
        yield lambda done: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    with tqdm(total=total, desc=what, unit=unit, unit_scale=True) as bar:
        yield bar.update
