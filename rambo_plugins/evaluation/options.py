"""The command line of ``rambo-recall``: its options, and which of them need each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from rambo_plugins.evaluation.inputs import check_number, check_seed
from rambo_plugins.evaluation.recall import LONE
from rambo_plugins.evaluation.scores import METRICS

OUTPUTS = ("json", "plot", "panel")
LARGEST = 400  # rows or columns of a panel, which matplotlib can still draw
DEFAULTS = {
    "parameters": "",
    "check": 1000,
    "seed": 0,
    "image_root": Path(),
    "panel_queries": 8,
    "panel_neighbours": 10,
}
KS = [1, 10, 100, 1000]
EMBEDDINGS = ".npy, .npz, .fvecs, .bvecs, .ivecs or .parquet"

# what does nothing without one of others
PARTNERS = {
    "gallery_labels": ["gallery"],
    "query_ids": ["gallery_ids"],
    "gallery_ids": ["query_ids"],
    "seed": ["sample", "index", "panel"],
    "parameters": ["index"],
    "check": ["index"],
    "query_images": ["panel"],
    "gallery_images": ["panel"],
    "image_root": ["panel"],
    "panel_queries": ["panel"],
    "panel_neighbours": ["panel"],
}


def parse(argv: list[str] | None, description: str) -> argparse.Namespace:
    """The arguments of a command line that makes sense as a whole.

    Raises:
        ValueError: one that does not.
    """
    args = _parser(description).parse_args(argv)
    _check_partners(args)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_seed(args.seed)
    for name in ("sample", "check"):
        if (number := getattr(args, name)) is not None:
            check_number(number, _option(name), "a positive number of queries")
    for name in ("panel_queries", "panel_neighbours"):
        if check_number(getattr(args, name), _option(name), "a positive number of images") > LARGEST:
            raise ValueError(f"{_option(name)}: expected at most {LARGEST} images, got {getattr(args, name)}")
    return args


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_partners(args: argparse.Namespace) -> None:
    def given(name: str) -> bool:
        return getattr(args, name) is not None

    def need(name: str, *others: str) -> None:
        if given(name) and not any(map(given, others)):
            expected = " or ".join(map(_option, others))
            raise ValueError(f"{_option(name)}: does nothing by itself, expected {expected} with it")

    for name, others in PARTNERS.items():
        need(name, *others)
    for name in ("query_ids", "gallery_images"):
        need(name, "gallery")
    if given("gallery") and not given("gallery_labels"):
        raise ValueError("--gallery: expected --gallery-labels with it")
    for side in ["query", "gallery"] if given("gallery") else ["query"]:
        if given("panel") and not given(f"{side}_images"):
            raise ValueError(f"--panel: expected --{side}-images with it, a .txt with the path of an image a line")
    if given("index") and (args.map_at_r or given("sample")):
        raise ValueError("--index: goes neither with --map-at-r nor with --sample")
    for option, files in (
        ("columns", ("query", "gallery")),
        ("label_column", ("query_labels", "gallery_labels")),
        ("id_column", ("query_ids", "gallery_ids")),
    ):
        if given(option) and not any(is_table(getattr(args, name)) for name in files):
            expected = " or ".join(map(_option, files))
            raise ValueError(f"{_option(option)}: does nothing by itself, expected a .parquet for {expected}")


def is_table(path: str | None) -> bool:
    return path is not None and Path(path).suffix == ".parquet"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see rambo-recall --help")


class _Once(argparse.Action):
    """Keeps the value, unless there is one already, which would be lost."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"argument {option_string}: expected once, got it again")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rambo-recall",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.register("action", None, _Once)
    data = parser.add_argument_group("what is compared")
    data.add_argument("--query", required=True, metavar="FILE", help=f"embeddings: {EMBEDDINGS}")
    data.add_argument(
        "--query-labels", required=True, metavar="FILE", help="labels: .npy, .npz, .ivecs, .parquet or .txt"
    )
    data.add_argument("--gallery", metavar="FILE", help="embeddings to search in; default: the queries themselves")
    data.add_argument("--gallery-labels", metavar="FILE", help="likewise, with --gallery")
    data.add_argument("--query-ids", metavar="FILE", help="with --gallery-ids: an item of the query's id is the query, "
                      "and left out")  # fmt: skip
    data.add_argument("--gallery-ids", metavar="FILE", help="each once")
    data.add_argument("--columns", nargs="+", metavar="NAME", help="of the vectors in a .parquet: one of lists, or one "
                      "a dimension; default: all, which then are one of lists, or numbered f0, f1, … in this order; "
                      "what pandas marks as its index is left out")  # fmt: skip
    data.add_argument("--label-column", metavar="NAME", help="of the labels in a .parquet with several columns")
    data.add_argument("--id-column", metavar="NAME", help="of the ids, likewise")

    search = parser.add_argument_group("figures")
    search.add_argument(
        "--ks", nargs="+", type=int, default=[1, 10, 100, 1000], metavar="K", help="default: 1 10 100 1000"
    )
    search.add_argument("--metric", choices=list(METRICS), default="inner_product", help="default: inner_product")
    search.add_argument("--normalize", action="store_true", help="bring all embeddings to length 1 first")
    search.add_argument("--lone", choices=LONE, default="exclude", help="queries without a relevant item: leave them "
                        "out of the mean, or count them as a miss")  # fmt: skip
    search.add_argument("--map-at-r", action="store_true", help="compute MAP@R too")
    search.add_argument("--sample", type=int, metavar="QUERIES", help="search only so many, drawn at random")
    search.add_argument("--seed", type=int, help="of what is drawn for --sample, --index and --panel; default: 0")
    search.add_argument("--max-memory", metavar="BYTES", help="800M, 4G: beyond what the files in memory take; "
                        "default: 512M, with --index 2G")  # fmt: skip
    search.add_argument("--device", nargs="+", help="cpu, cuda, cuda:1; several share the gallery; default: cuda if "
                        "there is one, else cpu")  # fmt: skip
    search.add_argument("--work", type=Path, metavar="FOLDER", help="new, or of the same command: keep finished parts "
                        "here until all is done; an --index for good")  # fmt: skip
    search.add_argument("--quiet", action="store_true", help="no progress bar")

    outputs = parser.add_argument_group("outputs, beside the line with the figures")
    outputs.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    outputs.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve over K to this file")

    approximate = parser.add_argument_group("approximate search, checked against exact search on a sample")
    approximate.add_argument("--index", metavar="FACTORY", help="of faiss: IVF4096,Flat; IVF65536_HNSW32,PQ64; HNSW32")
    approximate.add_argument("--parameters", help="of its search: nprobe=16, efSearch=256")
    approximate.add_argument("--check", type=int, metavar="QUERIES", help="that exact search takes too; default: 1000")

    panel = parser.add_argument_group("panel")
    panel.add_argument("--panel", type=Path, metavar="FILE", help="draw some queries with their nearest neighbours to "
                       "this file")  # fmt: skip
    panel.add_argument("--query-images", type=Path, metavar="FILE", help=".txt with the path of an image a line, a "
                       "line a query")  # fmt: skip
    panel.add_argument("--gallery-images", type=Path, metavar="FILE", help="likewise, with --gallery")
    panel.add_argument("--image-root", type=Path, metavar="FOLDER", help="that the paths start from; default: here")
    panel.add_argument("--panel-queries", type=int, metavar="ROWS", help="default: 8")
    panel.add_argument("--panel-neighbours", type=int, metavar="COLUMNS", help="default: 10")
    return parser
