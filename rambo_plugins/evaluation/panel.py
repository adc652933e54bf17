"""The panel of ``rambo-recall``: images of some queries, each in a row with the nearest of the gallery."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.files import read_paths
from rambo_plugins.evaluation.inputs import as_keys, find_own_rows, joint_codes
from rambo_plugins.evaluation.neighbours import find_neighbours
from rambo_plugins.evaluation.search import as_devices
from rambo_plugins.folders import whole


class Panel:
    """Some queries, drawn with the seed, and their nearest neighbours as images, by the command line's arguments.

    Args:
        args: of the command line.
        data: the arguments of ``recall_at_k`` that were read from its files.

    Raises:
        ValueError: lists of images of another length than the labels; an image of these queries is missing.
    """

    def __init__(self, args: argparse.Namespace, data: Mapping[str, Any]) -> None:
        self.args, self.data = args, data
        labels, self.images = [], []
        for side in ("query", "gallery") if "gallery" in data else ("query",):
            labels.append(as_keys(data[f"{side}_labels"], f"{side}_labels"))
            listed = getattr(args, f"{side}_images")
            self.images.append([args.image_root / path for path in read_paths(listed)])
            if len(self.images[-1]) != len(labels[-1]):
                raise ValueError(f"{listed}: expected {len(labels[-1])} lines, as labels, got {len(self.images[-1])}")
        self.query_codes, self.gallery_codes = joint_codes(labels[0], labels[-1], "query_labels and gallery_labels")
        num = len(self.query_codes)
        drawn = np.random.default_rng(args.seed).choice(num, min(args.panel_queries, num), replace=False)
        self.at = np.sort(drawn)
        for path in (self.images[0][row] for row in self.at):
            if not path.is_file():
                raise ValueError(f"{path}: no such image; paths are taken from --image-root {args.image_root}")

    def draw(self, path: Path) -> None:
        args, data, num = self.args, self.data, len(self.query_codes)
        query = Embeddings(data["query"], "query", num, args.normalize)
        if "gallery" in data:
            gallery = Embeddings(data["gallery"], "gallery", len(self.gallery_codes), args.normalize)
            own = find_own_rows(data.get("query_ids"), data.get("gallery_ids"), num, gallery.num)[self.at]
        else:
            gallery, own = query, self.at
        devices = as_devices(args.device)
        _, found = find_neighbours(
            query, self.at, own, gallery, args.panel_neighbours, args.metric, args.max_memory, devices
        )
        draw_neighbours(
            path,
            [self.images[0][row] for row in self.at],
            [[self.images[-1][row] for row in rows if row >= 0] for rows in found],
            self.gallery_codes[found] == self.query_codes[self.at][:, None],
            f"{len(self.at)} of {num:,} queries, and their nearest of {gallery.num:,}: green, the same label",
        )


def draw_neighbours(
    path: Path, queries: Sequence[Path], neighbours: Sequence[Sequence[Path]], relevant: np.ndarray, title: str
) -> None:
    """A row a query: its image, and those of its neighbours, framed green if relevant and red if not.

    Args:
        path: of the figure, in a format that matplotlib writes.
        queries: B image files.
        neighbours: B sequences of up to k images each.
        relevant: (B, k) bool.
        title: of the figure.

    Raises:
        OSError: a file that is missing.
        ValueError: no image, or one that RGB cannot show (``rambo_plugins.images``).
    """
    from matplotlib.figure import Figure

    from rambo_plugins.images import read_image

    columns = 1 + max(map(len, neighbours))
    figure = Figure(figsize=(0.9 * columns + 0.3, 0.95 * len(queries) + 0.4), layout="constrained")
    grid = figure.subplots(len(queries), columns, squeeze=False)
    for row, (query, found) in enumerate(zip(queries, neighbours, strict=True)):
        for column, axes in enumerate(grid[row]):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(column > 0 and column <= len(found))
            if column > len(found):
                continue
            image = read_image(query if column == 0 else found[column - 1])
            image.thumbnail((256, 256))
            axes.imshow(image)
            if column:
                axes.spines[:].set(color="tab:green" if relevant[row, column - 1] else "tab:red", linewidth=2.5)
    figure.suptitle(title, fontsize=9)
    with whole(path) as unfinished:
        figure.savefig(unfinished, dpi=150)
