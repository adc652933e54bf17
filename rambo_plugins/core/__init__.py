"""The ranking core: torch, and numba where it is installed. The conventions are at the top of ``ranking.py``."""

from rambo_plugins.core.checks import check_nan
from rambo_plugins.core.graded_metrics import NDCGLoss, SpearmanLoss, ndcg_loss, spearman_loss
from rambo_plugins.core.losses import (
    AveragePrecisionLoss,
    RankLoss,
    RecallLoss,
    average_precision_item_loss,
    average_precision_loss,
    recall_item_loss,
    recall_loss,
)
from rambo_plugins.core.memory import ScoreMemory
from rambo_plugins.core.rank_metrics import (
    PrecisionAtKLoss,
    RecallAtKLoss,
    ReciprocalRankLoss,
    precision_at_k_loss,
    recall_at_k_loss,
    reciprocal_rank_loss,
)
from rambo_plugins.core.ranking import RankStatistics, rank, rank_loss

__all__ = [
    "AveragePrecisionLoss",
    "NDCGLoss",
    "PrecisionAtKLoss",
    "RankLoss",
    "RankStatistics",
    "RecallAtKLoss",
    "RecallLoss",
    "ReciprocalRankLoss",
    "ScoreMemory",
    "SpearmanLoss",
    "average_precision_item_loss",
    "average_precision_loss",
    "check_nan",
    "ndcg_loss",
    "precision_at_k_loss",
    "rank",
    "rank_loss",
    "recall_at_k_loss",
    "recall_item_loss",
    "recall_loss",
    "reciprocal_rank_loss",
    "spearman_loss",
]
