"""Recall@K of embeddings in files, from the command line: ``rambo-recall``.

    rambo-recall --query test.npy --query-labels labels.npy --ks 1 10 100 --normalize --json recall.json
    rambo-recall --query q.npy --query-labels ql.txt --gallery g.fvecs --gallery-labels gl.txt --plot curve.png
    rambo-recall --query q.npy --query-labels ql.npy --gallery 10m.bvecs --gallery-labels gl.npy \\
        --index IVF65536_HNSW32,SQ8 --parameters nprobe=64 --work index
    rambo-recall --query test.npy --query-labels labels.npy --query-images paths.txt --panel neighbours.png

Without --gallery the queries search among themselves. Labels and ids are integers or strings, of one kind on both
sides; each line of a .txt is a string. With --work FOLDER the same command goes on, after an interruption, from the
parts that are finished. A panel shows queries, drawn with the seed, and their nearest neighbours.

What you can mend is one line on standard error and the exit code 2; where only an output could not be written, the
figures are printed all the same. An interruption is the exit code 130. A traceback is a fault of ours.
"""

from __future__ import annotations

import argparse
import dis
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rambo_plugins.evaluation.approximate import approximate_recall_at_k
from rambo_plugins.evaluation.files import read_embeddings, read_keys
from rambo_plugins.evaluation.options import OUTPUTS, is_table, parse
from rambo_plugins.evaluation.panel import Panel
from rambo_plugins.evaluation.recall import recall_at_k
from rambo_plugins.evaluation.result import RecallResult, wilson_interval
from rambo_plugins.evaluation.search import as_devices
from rambo_plugins.evaluation.work import remove
from rambo_plugins.folders import whole

FILES = ("query", "gallery", "query_labels", "gallery_labels", "query_ids", "gallery_ids")


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv, str(__doc__).replace("``", ""))
        return _run(args)
    except KeyboardInterrupt:
        _say("interrupted; with --work FOLDER the same command goes on from the parts that were finished")
        return 130
    except Exception as error:
        if not _to_mend(error):
            raise
        _say(f"error: {_line(error)}")
        return 2


def _run(args: argparse.Namespace) -> int:
    _try_outputs(args)
    as_devices(args.device)
    data = _read(args)
    panel = None if args.panel is None else Panel(args, data)
    options: dict[str, Any] = {
        "ks": args.ks,
        "metric": args.metric,
        "normalize": args.normalize,
        "lone": args.lone,
        "seed": args.seed,
        "max_memory": args.max_memory,
        "device": args.device,
        "progress": not args.quiet,
    }
    if args.index is None:
        exact = {"map_at_r": args.map_at_r, "sample": args.sample, "work": args.work}
        result = recall_at_k(**data, **options, **exact)
    else:
        approximate = {"parameters": args.parameters, "check": args.check, "folder": args.work}
        result = approximate_recall_at_k(**data, **options, index=args.index, **approximate)

    steps: dict[str, Callable[[], None]] = {"line of them": lambda: print(result, flush=True)}
    if args.json is not None:
        steps["JSON"] = lambda: save(result, _in_folder(args.json))
    if args.plot is not None:
        steps["plot"] = lambda: draw(result, _in_folder(args.plot))
    if panel is not None:
        steps["panel"] = lambda: panel.draw(_in_folder(args.panel))
    if not _all_done(steps):
        return 2
    if args.work is not None and args.index is None:  # all is written
        remove(args.work)
    return 0


def _read(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``recall_at_k`` that are in files."""
    named = {"columns": args.columns, "label_column": args.label_column, "id_column": args.id_column}
    data = {}
    for name in FILES:
        path = getattr(args, name)
        if path is None:
            continue
        option = "label_column" if "labels" in name else "id_column" if "ids" in name else "columns"
        reader = read_embeddings if option == "columns" else read_keys
        data[name] = reader(path, named[option] if is_table(path) else None)
    return data


def _try_outputs(args: argparse.Namespace) -> None:
    """Raises, before the work, what would keep an output from being written after it. Writes nothing."""
    outputs = {name: path.resolve() for name in OUTPUTS if (path := getattr(args, name)) is not None}
    if "plot" in outputs or "panel" in outputs:
        from matplotlib.figure import Figure

        kinds = Figure().canvas.get_supported_filetypes()
    for name, path in outputs.items():
        if name != "json" and path.suffix.lower()[1:] not in kinds:
            expected = ", ".join(f".{kind}" for kind in sorted(kinds))
            raise ValueError(f"--{name}: expected a name that ends in {expected}, got {str(path)!r}")
        if path.exists() and not path.is_file():
            raise ValueError(f"--{name}: expected a file to write, got {str(path)!r}, which is none")
        for other, taken in [
            *((one, Path(getattr(args, one)).resolve()) for one in FILES if getattr(args, one) is not None),
            *((one, outputs[one]) for one in outputs if one != name),
        ]:
            if path == taken:
                raise ValueError(f"--{name}: expected another file than --{other.replace('_', '-')}, got {str(path)!r}")
        folder = next(folder for folder in path.parents if folder.exists())
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"--{name}: {str(path)!r} cannot be written: {error.strerror}: {str(folder)!r}") from error


def _all_done(steps: dict[str, Callable[[], None]]) -> bool:
    """Whether all steps went well. One that fails keeps none of the others from being done."""
    failed, ours = False, None
    for name, step in steps.items():
        try:
            step()
        except Exception as error:
            _say(f"error: the figures are right, but there is no {name}: {_line(error)}")
            failed, ours = True, ours if _to_mend(error) else error
    if ours is not None:
        raise ours
    return not failed


def _in_folder(path: Path) -> Path:
    """Where a link leads, in a folder that is there."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _to_mend(error: Exception) -> bool:
    """Whether whoever calls can mend it: what the system says, and what our own lines say by ``raise``.

    The same classes come out of numpy and others where a line of ours is wrong.
    """
    if isinstance(error, OSError | ModuleNotFoundError) or _is_out_of_memory(error):
        return True
    if not isinstance(error, ValueError | TypeError | ImportError) or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    ours = str(last.tb_frame.f_globals.get("__name__")).partition(".")[0] in ("rambo_plugins", "__main__")
    return ours and dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on the CPU


def _line(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    if _is_out_of_memory(error):
        return f"out of memory: {said.splitlines()[0]}; lower --max-memory, or bring embeddings as .npy, read in blocks"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return said


def _say(line: str) -> None:
    """One line, whatever is in the name of a file."""
    text = f"rambo-recall: {line}".replace("\n", "\\n").encode(errors="backslashreplace").decode()
    print(text, file=sys.stderr)


def save(result: RecallResult, path: Path) -> None:
    with whole(path) as unfinished:
        unfinished.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")


def draw(result: RecallResult, path: Path) -> None:
    """Recall@K for each K up to the largest, with the 95 % interval of the mean over the queries."""
    from matplotlib.figure import Figure

    averaged = result.num_averaged
    cutoffs = np.arange(1, min(result.ks[-1], result.num_gallery) + 1)
    hits = np.bincount(result.first_rank[result.first_rank > 0], minlength=len(cutoffs) + 1)[1:].cumsum()
    share = hits / averaged if averaged else np.full(len(cutoffs), np.nan)
    low, high = np.transpose([wilson_interval(one, averaged) for one in share])
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(cutoffs, 100 * low, 100 * high, alpha=0.25, linewidth=0)
    axes.plot(cutoffs, 100 * share)
    marked = [k for k in result.ks if k <= len(cutoffs)]
    axes.plot(marked, [100 * result.recall[k] for k in marked], "o")
    axes.set(xscale="log", xlabel="K", ylabel="Recall@K in %", title=f"{averaged:,} queries, 95 % interval")
    with whole(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
