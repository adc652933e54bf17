"""Recall@K and MAP@R over large galleries: exact, in bounded memory, ties broken against the relevant item.

``recall_at_k`` measures embeddings and labels, ``RecallMetric`` gathers them batch by batch on one process or several,
``approximate_recall_at_k`` uses an approximate index and checks it. ``RecallCalculator`` goes into the testers of
pytorch-metric-learning, ``ExactKNN`` into its own calculator.
"""

try:
    import faiss  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'rambo_plugins.evaluation needs faiss: pip install "rambo-plugins[faiss-cpu]" '
        '(or, with CUDA, "rambo-plugins[faiss-gpu]")'
    ) from error

from rambo_plugins.evaluation.approximate import approximate_recall_at_k
from rambo_plugins.evaluation.calculator import RecallCalculator
from rambo_plugins.evaluation.distributed import RecallMetric
from rambo_plugins.evaluation.neighbours import ExactKNN
from rambo_plugins.evaluation.recall import RecallResult, recall_at_k

__all__ = [
    "ExactKNN",
    "RecallCalculator",
    "RecallMetric",
    "RecallResult",
    "approximate_recall_at_k",
    "recall_at_k",
]
