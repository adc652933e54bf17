"""Recall@K and MAP@R over large galleries: exact nearest neighbours by faiss, ties broken against the relevant item.

``recall_at_k`` measures embeddings and labels; ``RecallCalculator`` plugs the same into the testers of
pytorch-metric-learning, and ``ExactKNN`` to its own calculator.
"""

try:
    import faiss  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'rambo_plugins.evaluation needs faiss: pip install "rambo-plugins[faiss-cpu]" '
        '(or, with CUDA, "rambo-plugins[faiss-gpu]")'
    ) from error

from rambo_plugins.evaluation.calculator import RecallCalculator
from rambo_plugins.evaluation.neighbours import ExactKNN
from rambo_plugins.evaluation.recall import RecallResult, recall_at_k

__all__ = ["ExactKNN", "RecallCalculator", "RecallResult", "recall_at_k"]
