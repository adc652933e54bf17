"""``rambo-recall``: Recall@K of embeddings in files, from the command line.

    rambo-recall --query test.npy --query-labels labels.npy --ks 1 10 100 --normalize --json recall.json
    rambo-recall --query q.npy --query-labels ql.txt --gallery g.fvecs --gallery-labels gl.npy --plot curve.png
    rambo-recall --query q.npy --query-labels ql.npy --gallery 10m.bvecs --gallery-labels gl.npy \\
        --index IVF65536_HNSW32,SQ8 --parameters nprobe=64 --work index
    rambo-recall --query test.npy --query-labels labels.npy --query-images paths.txt --panel neighbours.png

Without ``--gallery`` the queries search among themselves. With ``--work FOLDER`` the same command goes on, after an
interruption, from the parts that are finished. A panel shows queries, drawn with the seed, and their nearest
neighbours. Bad files and options end in one line on standard error and the exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rambo_plugins.evaluation.approximate import approximate_recall_at_k
from rambo_plugins.evaluation.files import read_embeddings, read_keys
from rambo_plugins.evaluation.panel import Panel
from rambo_plugins.evaluation.recall import LONE, recall_at_k
from rambo_plugins.evaluation.result import RecallResult, wilson_interval
from rambo_plugins.evaluation.scores import METRICS
from rambo_plugins.evaluation.work import remove

KEYS = ("query_labels", "gallery_labels", "query_ids", "gallery_ids")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        for path in (args.json, args.plot, args.panel):
            if path is not None:  # before the search, not after it
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        if args.plot is not None or args.panel is not None:
            import matplotlib  # noqa: F401
        panel = None if args.panel is None else Panel(args)
        keys: dict[str, Any] = {name: read_keys(path) for name in KEYS if (path := getattr(args, name)) is not None}
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
        if args.index is not None and (args.map_at_r or args.sample is not None):
            raise ValueError("--index: goes neither with --map-at-r nor with --sample")
        gallery = None if args.gallery is None else read_embeddings(args.gallery)
        if args.index is None:
            exact = {"map_at_r": args.map_at_r, "sample": args.sample, "work": args.work}
            result = recall_at_k(read_embeddings(args.query), gallery=gallery, **keys, **options, **exact)
        else:
            approximate = {"parameters": args.parameters, "check": args.check, "folder": args.work}
            result = approximate_recall_at_k(
                read_embeddings(args.query), gallery=gallery, index=args.index, **keys, **options, **approximate
            )
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"rambo-recall: error: {error}", file=sys.stderr)
        return 2
    print(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    if args.plot is not None:
        draw(result, args.plot)
    if panel is not None:
        try:
            panel.draw(args.panel)
        except (ValueError, OSError) as error:
            print(f"rambo-recall: error: the figures are right, but there is no panel: {error}", file=sys.stderr)
            return 2
    if args.work is not None and args.index is None:  # all is written
        remove(args.work)
    return 0


def draw(result: RecallResult, path: Path) -> None:
    """Recall@K for each K up to the largest, with the 95 % interval of the mean over the queries."""
    from matplotlib.figure import Figure

    averaged = result.num_averaged
    cutoffs = np.arange(1, result.ks[-1] + 1)
    hits = np.bincount(result.first_rank[result.first_rank > 0], minlength=len(cutoffs) + 1)[1:].cumsum()
    share = hits / max(averaged, 1)
    low, high = np.transpose([wilson_interval(one, averaged) for one in share])
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(cutoffs, 100 * low, 100 * high, alpha=0.25, linewidth=0)
    axes.plot(cutoffs, 100 * share)
    marked = [k for k in result.ks if k <= len(cutoffs)]
    axes.plot(marked, [100 * result.recall[k] for k in marked], "o")
    axes.set(xscale="log", xlabel="K", ylabel="Recall@K in %", title=f"{averaged:,} queries, 95 % interval")
    figure.savefig(path, dpi=120)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rambo-recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--query", required=True, help="embeddings: .npy, .npz, .fvecs, .bvecs, .ivecs or .parquet")
    parser.add_argument("--query-labels", required=True, help="labels: .npy, .npz, .ivecs, .parquet, or .txt of lines")
    parser.add_argument("--gallery", help="embeddings to search in; default: the queries themselves")
    parser.add_argument("--gallery-labels")
    parser.add_argument("--query-ids", help="with --gallery-ids: an item of the query's id is the query, and left out")
    parser.add_argument("--gallery-ids")
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 10, 100, 1000], metavar="K")
    parser.add_argument("--metric", choices=list(METRICS), default="inner_product")
    parser.add_argument("--normalize", action="store_true", help="bring all embeddings to length 1 first")
    parser.add_argument("--lone", choices=LONE, default="exclude", help="queries without a relevant item")
    parser.add_argument("--map-at-r", action="store_true", help="compute MAP@R too")
    parser.add_argument("--sample", type=int, metavar="QUERIES", help="search only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--max-memory", metavar="BYTES", help="800M, 4G: beyond what the files in memory take")
    parser.add_argument("--device", nargs="+", help="cpu, cuda, cuda:1; several share the gallery")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="keep finished parts here until all is done; an --index for good"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the curve over K to this file")
    approximate = parser.add_argument_group("approximate search, checked against exact search on a sample")
    approximate.add_argument("--index", metavar="FACTORY", help="of faiss: IVF4096,Flat; IVF65536_HNSW32,PQ64; HNSW32")
    approximate.add_argument("--parameters", default="", help="of its search: nprobe=16, efSearch=256")
    approximate.add_argument("--check", type=int, default=1000, metavar="QUERIES", help="that exact search takes too")
    panel = parser.add_argument_group("panel")
    panel.add_argument("--panel", type=Path, help="draw queries with their nearest neighbours to this file")
    panel.add_argument("--query-images", type=Path, help=".txt with the path of an image a line, a line a query")
    panel.add_argument("--gallery-images", type=Path, help="likewise, with --gallery")
    panel.add_argument("--image-root", type=Path, default=Path(), help="that the paths start from")
    panel.add_argument("--panel-queries", type=int, default=8, metavar="ROWS")
    panel.add_argument("--panel-neighbours", type=int, default=10, metavar="COLUMNS")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
