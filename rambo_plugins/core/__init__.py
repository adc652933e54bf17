"""The ranking core: torch and the standard library only. The conventions are at the top of ``ranking.py``."""

from rambo_plugins.core.checks import check_nan
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
from rambo_plugins.core.ranking import RankStatistics, rank, rank_loss

__all__ = [
    "AveragePrecisionLoss",
    "RankLoss",
    "RankStatistics",
    "RecallLoss",
    "ScoreMemory",
    "average_precision_item_loss",
    "average_precision_loss",
    "check_nan",
    "rank",
    "rank_loss",
    "recall_item_loss",
    "recall_loss",
]
