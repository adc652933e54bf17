"""``recall_at_k`` in the place of pytorch-metric-learning's AccuracyCalculator, for its testers and their hooks."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rambo_plugins.evaluation.embeddings import as_embeddings
from rambo_plugins.evaluation.inputs import ArrayLike, as_keys, check_choice, check_ks
from rambo_plugins.evaluation.plan import parse_bytes
from rambo_plugins.evaluation.recall import LONE, recall_at_k
from rambo_plugins.evaluation.result import RecallResult
from rambo_plugins.evaluation.scores import METRICS
from rambo_plugins.evaluation.search import as_devices


class RecallCalculator:
    """Recall@K and MAP@R for ``accuracy_calculator=`` of a tester.

    The figures are called ``recall_at_1``, …, ``mean_average_precision_at_r``: names that SQL tables take, and
    HookContainer as its ``primary_metric``. The equations and arguments are those of ``recall_at_k``; ``result`` keeps
    the full outcome of the latest evaluation. Testers normalize embeddings unless told otherwise; if told so, their
    own calculator ranks by L2, which here is ``metric="l2"``.

    >>> calculator = RecallCalculator(ks=(1, 2))
    >>> calculator.get_curr_metrics()
    ['recall_at_1', 'recall_at_2', 'mean_average_precision_at_r']
    >>> calculator.get_accuracy(np.eye(3)[[0, 1, 0, 1]], np.array([7, 8, 7, 8]))
    {'recall_at_1': 1.0, 'recall_at_2': 1.0, 'mean_average_precision_at_r': 1.0}
    """

    def __init__(
        self,
        ks: Iterable[int] = (1, 2, 4, 8),
        map_at_r: bool = True,
        *,
        metric: str = "inner_product",
        normalize: bool = False,
        lone: str = "exclude",
        max_memory: int | str | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        progress: bool = False,
    ) -> None:
        check_choice(metric, "metric", METRICS)
        check_choice(lone, "lone", LONE)
        self.ks = check_ks(ks)
        self.map_at_r = map_at_r
        self.metric = metric
        self.normalize = normalize
        self.lone = lone
        parse_bytes(max_memory)
        self.max_memory = max_memory
        self.devices = as_devices(device)
        self.progress = progress
        self.result: RecallResult | None = None

    def get_accuracy(
        self,
        query: ArrayLike,
        query_labels: ArrayLike,
        reference: ArrayLike | None = None,
        reference_labels: ArrayLike | None = None,
        ref_includes_query: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> dict[str, float]:
        """The figures of one evaluation.

        Args:
            query: (Q, D) array or tensor.
            query_labels: (Q,) integers or strings.
            reference: (N, D), the gallery. None: the queries search among themselves.
            reference_labels: (N,).
            ref_includes_query: the first Q rows of the reference are the queries; each query leaves its own row out.
            include: names to report; all if empty.
            exclude: names not to report.

        Returns:
            name -> fraction in [0, 1].

        Raises:
            ValueError: an unknown name; a reference that does not start with the queries though it should; and as
                ``recall_at_k``.
        """
        names = self._select(tuple(include), tuple(exclude))
        ids: dict[str, Any] = {}
        if reference is not None and ref_includes_query:
            query, reference = as_embeddings(query, "query"), as_embeddings(reference, "reference")
            query_labels = as_keys(query_labels, "query_labels", len(query))
            if reference_labels is None:
                raise ValueError("reference: expected reference_labels with it, got None")
            reference_labels = as_keys(reference_labels, "reference_labels", len(reference))
            count = len(query)
            if not (
                query.shape == reference[:count].shape
                and np.allclose(query, reference[:count])
                and np.array_equal(query_labels, reference_labels[:count])
            ):
                raise ValueError(
                    f"ref_includes_query: expected the first {count} rows of reference and reference_labels to be the "
                    f"queries and their labels, got others (query {query.shape}, reference {reference.shape})"
                )
            ids = {"query_ids": np.arange(count), "gallery_ids": np.arange(len(reference))}
        self.result = recall_at_k(
            query,
            query_labels,
            reference,
            reference_labels,
            self.ks,
            metric=self.metric,
            normalize=self.normalize,
            lone=self.lone,
            map_at_r="mean_average_precision_at_r" in names,
            max_memory=self.max_memory,
            device=self.devices,
            progress=self.progress,
            **ids,
        )
        figures = {f"recall_at_{k}": value for k, value in self.result.recall.items()}
        if self.result.map_at_r is not None:
            figures["mean_average_precision_at_r"] = self.result.map_at_r
        return {name: figures[name] for name in names}

    def get_curr_metrics(self) -> list[str]:
        """The names that ``get_accuracy`` reports, unless told to include or exclude some."""
        return [f"recall_at_{k}" for k in self.ks] + ["mean_average_precision_at_r"] * self.map_at_r

    def description(self) -> str:
        """What testers append to the name of their record tables."""
        return "recall_at_k"

    def _select(self, include: tuple[str, ...], exclude: tuple[str, ...]) -> list[str]:
        names = self.get_curr_metrics()
        for name in include + exclude:
            check_choice(name, "include and exclude", names)
        return [name for name in names if name in (include or names) and name not in exclude]
