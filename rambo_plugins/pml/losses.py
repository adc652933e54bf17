"""The recall and the average-precision loss as losses of pytorch-metric-learning.

Each embedding is a query. It ranks the references (the batch itself, or ``ref_emb``) without itself, and the memory;
the scores are similarities, or distances with the sign turned. The conventions are those of ``core/ranking.py``.

A reference is the query itself where both are the same row of the same tensor: where ``ref_emb`` is the batch, or one
is a view or a part of the other. Whether their labels are one tensor does not matter: the second view of an image is a
relevant reference in any case, and so is a ``clone()``. (The losses of pytorch-metric-learning leave the pair of query
i and reference i out wherever both labels are one tensor, and with it the only positives of two views; so do its
miners, and ``DistributedLossWrapper(efficient=True)`` always, before a loss sees the pairs.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor

from rambo_plugins.core import (
    RankStatistics,
    ScoreMemory,
    average_precision_item_loss,
    checks,
    rank_loss,
    recall_item_loss,
)
from rambo_plugins.core.distributed import num_processes
from rambo_plugins.core.losses import Weighting
from rambo_plugins.core.ranking import ItemLoss
from rambo_plugins.pml.gather import connect_gathered

PAPER_PRESETS: dict[str, dict[str, Any]] = {
    "sop": {"lambda_val": 4.0, "margin": 0.02, "memory": 3, "weighting": "loglog"},
    "inshop": {"lambda_val": 0.2, "margin": 0.05, "memory": 3, "weighting": "log"},
    "cub": {"lambda_val": 0.2, "margin": 0.02, "memory": 3, "weighting": "loglog"},
}
"""The paper's hyperparameters by data set, for batches of 128, each with the weighting that did better there:
``RamboRecallLoss(**PAPER_PRESETS["sop"])``."""


class RamboLoss(BaseMetricLossFunction):
    """What both losses share: scores from distances, masks from labels or tuples, memory and statistics.

    Args:
        item_loss: the loss of one relevant item, see ``rambo_plugins.core.rank_loss``.
        lambda_val: λ in [1e-30, 1e30], of normalised ranks and of the mean over the queries of the batch.
        margin: α ≥ 0 (Eq. 14), in units of the distance; or several, over which the loss is averaged.
        memory: τ ≥ 0, how many past batches of references to rank as well (§4.3). Needs labels. All that it holds is
            ranked, also with a miner, which has not seen it: of the batch a query ranks what the miner pairs it with.
        memory_warmup: forward passes before the memory is used.
        normalize, lambda_per, rank_plus_grad: as in ``rambo_plugins.core.rank_loss``; a row is a query.
        distributed_grad: inside ``DistributedLossWrapper(efficient=True)``, which gathers the other processes'
            embeddings as constants: give them their gradient too, and divide λ among the processes, so that the sum is
            the gradient of one process with the whole batch. Needs equal batches on all processes.
        **kwargs: ``distance`` (default ``CosineSimilarity()``), ``reducer`` (default mean over the queries that have
            a relevant reference), ``embedding_regularizer``, ``embedding_reg_weight``, ``collect_stats``.

    With ``collect_stats=True`` a forward pass records ``share_with_positive``, the share of the queries that have a
    relevant item (the others do not count; at 0 nothing is trained), and of these ``mean_r`` (irrelevant items above a
    relevant one) and the shares ``share_perfect`` of the queries without any and ``share_zero_gradient`` of the
    relevant items that λ does not reach: where it is near 1 before the loss is small, λ is too small (where no gradient
    is asked for it is 1).

    A training step is one forward pass: each takes its references into the memory at its end, and one that raises
    leaves the memory as it was. What repeats a step's pass meets the batch itself in the memory: keep the loss out of
    ``torch.utils.checkpoint``, and take ``memory=0`` where an optimizer calls a closure several times (L-BFGS).

    Raises (in a forward pass):
        TypeError: labels that are no integers; two of them can be one and the same as floats.
        ValueError: NaN among the scores; a memory, ``ref_emb`` or ``ref_labels`` without what they need.
    """

    def __init__(
        self,
        item_loss: ItemLoss,
        *,
        lambda_val: float,
        margin: float | Sequence[float],
        memory: int,
        memory_warmup: int,
        normalize: bool,
        lambda_per: str,
        rank_plus_grad: bool,
        distributed_grad: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        checks.check_choice("lambda_per", lambda_per, ("batch", "row"))
        self.item_loss = item_loss
        self.lambda_val = checks.check_lambda(lambda_val)
        self.margin = checks.check_margin(margin)
        self.memory = ScoreMemory(
            checks.check_integer("memory", memory, 0), warmup=checks.check_integer("memory_warmup", memory_warmup, 0)
        )
        self.normalize = checks.check_flag("normalize", normalize)
        self.lambda_per = lambda_per
        self.rank_plus_grad = checks.check_flag("rank_plus_grad", rank_plus_grad)
        self.distributed_grad = checks.check_flag("distributed_grad", distributed_grad)
        self._to_keep: tuple[Tensor, Tensor] | None = None
        recorded = ["lambda_val"] if isinstance(self.margin, tuple) else ["lambda_val", "margin"]  # numbers alone
        self.add_to_recordable_attributes(list_of_names=recorded, is_stat=False)
        self.add_to_recordable_attributes(
            list_of_names=["share_with_positive", "mean_r", "share_perfect", "share_zero_gradient"], is_stat=True
        )

    def get_default_distance(self) -> CosineSimilarity:
        return CosineSimilarity()

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """As of all losses of the host: what its reducer makes of the losses of the queries.

        Args:
            embeddings: (B, D) float.
            labels: (B,) integer; only an ``indices_tuple`` can stand for them.
            indices_tuple: of a miner, the pairs that are ranked; None: all.
            ref_emb, ref_labels: (R, D) float and (R,) integer, what is ranked; None: the batch.
        """
        check_labels("labels", labels)
        check_labels("ref_labels", ref_labels)
        if ref_emb is None and ref_labels is not None:
            raise ValueError("ref_labels need the ref_emb whose labels they are, got None")
        try:
            loss = super().forward(embeddings, labels, indices_tuple, ref_emb, ref_labels)
            if self._to_keep is not None:
                self.memory.push(*self._to_keep)
        finally:
            self._to_keep = None
        return loss

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        c_f.labels_or_indices_tuple_required(labels, indices_tuple)
        relevance, mask = _relevance_and_mask(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        lambda_val, gallery = self.lambda_val, ref_emb
        if self.distributed_grad:
            gallery = connect_gathered(embeddings, ref_emb)
            if self.lambda_per == "batch":
                lambda_val /= num_processes()
        if self.memory.batches and self.training:
            gallery, relevance, mask = self._with_memory(labels, gallery, ref_labels, relevance, mask)

        matrix = self.distance(embeddings, gallery)
        losses, statistics = rank_loss(
            matrix if self.distance.is_inverted else -matrix,
            relevance,
            self.item_loss,
            lambda_val=lambda_val,
            margin=self.margin,
            mask=mask,
            reduction="none",
            normalize=self.normalize,
            lambda_per=self.lambda_per,
            rank_plus_grad=self.rank_plus_grad,
        )
        if self.collect_stats:
            self._record(statistics)
        queries = torch.where(statistics.num_relevant > 0)[0]
        if len(queries) == 0:
            # A zero in the graph: with distributed_grad the other processes wait for this one's backward pass.
            return {"loss": {**self.zero_loss(), "losses": losses.sum()}}
        return {"loss": {"losses": losses[queries], "indices": queries, "reduction_type": "element"}}

    def _with_memory(
        self, labels: Tensor | None, gallery: Tensor, ref_labels: Tensor | None, relevance: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gallery and its masks, longer by the memory, which takes the references in when all is done."""
        if labels is None or ref_labels is None:
            raise ValueError(f"a memory of {self.memory.batches} batches needs labels, got only an indices_tuple")
        past = self.memory.contents()
        if torch.is_grad_enabled() and gallery.requires_grad:
            self._to_keep = gallery, ref_labels
        if past is None:
            return gallery, relevance, mask
        if past[0].shape[1:] != gallery.shape[1:]:
            known, came = ([tuple(batch[0].shape[1:]), ()] for batch in (past, (gallery,)))
            raise ValueError(f"the memory holds items of shapes {known}, got {came}: reset() it first")
        past_embeddings = c_f.to_device(past[0], gallery, dtype=gallery.dtype)
        same_label = labels[:, None] == c_f.to_device(past[1], labels)[None]
        return (
            torch.cat([gallery, past_embeddings]),
            torch.cat([relevance, same_label], dim=1),
            torch.cat([mask, torch.ones_like(same_label)], dim=1),
        )

    def _record(self, statistics: RankStatistics) -> None:
        num_relevant = statistics.num_relevant.sum().clamp(min=1)
        with_positive = statistics.num_relevant > 0
        num_queries = with_positive.sum().clamp(min=1)
        perfect = with_positive & (statistics.mean_r == 0)
        self.share_with_positive = with_positive.sum().item() / max(1, len(with_positive))
        self.mean_r = ((statistics.mean_r * statistics.num_relevant).sum() / num_relevant).item()
        self.share_perfect = (perfect.sum() / num_queries).item()
        self.share_zero_gradient = (statistics.zero_gradient.sum() / num_relevant).item()


class RamboRecallLoss(RamboLoss):
    r"""The loss of Recall@K at all K (Eqs. 16-20), ``rambo_plugins.core.recall_loss``.

    Args:
        weighting: "log", "loglog", a callable W, or a table of weights w_K.

    The other arguments are those of ``RamboLoss``.

    >>> loss_fn = RamboRecallLoss(lambda_val=4.0, margin=0.02)
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], requires_grad=True)
    >>> loss = loss_fn(embeddings, torch.tensor([0, 1, 0]))  # the second is nearer than the third, for both others
    >>> loss  # log(1 + 1); the second has no relevant item and does not count
    tensor(0.6931, grad_fn=<MeanBackward0>)
    """

    def __init__(
        self,
        lambda_val: float = 4.0,
        margin: float | Sequence[float] = 0.02,
        weighting: Weighting = "log",
        *,
        memory: int = 0,
        memory_warmup: int = 0,
        normalize: bool = True,
        lambda_per: str = "batch",
        rank_plus_grad: bool = False,
        distributed_grad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            recall_item_loss(weighting),
            lambda_val=lambda_val,
            margin=margin,
            memory=memory,
            memory_warmup=memory_warmup,
            normalize=normalize,
            lambda_per=lambda_per,
            rank_plus_grad=rank_plus_grad,
            distributed_grad=distributed_grad,
            **kwargs,
        )


class RamboAPLoss(RamboLoss):
    """One minus the mean average precision of the queries (Eqs. 21, 22), ``rambo_plugins.core.average_precision_loss``.

    The arguments are those of ``RamboLoss``.
    """

    def __init__(
        self,
        lambda_val: float = 4.0,
        margin: float | Sequence[float] = 0.02,
        *,
        memory: int = 0,
        memory_warmup: int = 0,
        normalize: bool = True,
        lambda_per: str = "batch",
        rank_plus_grad: bool = False,
        distributed_grad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            average_precision_item_loss,
            lambda_val=lambda_val,
            margin=margin,
            memory=memory,
            memory_warmup=memory_warmup,
            normalize=normalize,
            lambda_per=lambda_per,
            rank_plus_grad=rank_plus_grad,
            distributed_grad=distributed_grad,
            **kwargs,
        )


def _relevance_and_mask(
    embeddings: Tensor,
    labels: Tensor | None,
    indices_tuple: tuple[Tensor, ...] | None,
    ref_emb: Tensor,
    ref_labels: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Which references are relevant to each query, and which of them it ranks, both (queries, references)."""
    if indices_tuple is None:
        if labels is None or ref_labels is None:
            raise ValueError("ref_emb needs ref_labels, or an indices_tuple that says what is relevant")
        relevance = labels[:, None] == ref_labels[None]
        mask = torch.ones_like(relevance)
    else:
        query, positive, query_of_negative, negative = lmu.convert_to_pairs(indices_tuple, labels, ref_labels)
        relevance = torch.zeros(len(embeddings), len(ref_emb), dtype=torch.bool, device=embeddings.device)
        relevance[query, positive] = True
        mask = relevance.clone()
        mask[query_of_negative, negative] = True
    if ref_emb is embeddings:
        mask.fill_diagonal_(False)
    elif _share_memory(embeddings, ref_emb):
        query_at, reference_at = (
            torch.arange(len(rows), device=mask.device).mul(rows.stride()[0]).add(rows.storage_offset())
            for rows in (embeddings, ref_emb)
        )
        mask &= query_at[:, None] != reference_at[None]
    return relevance, mask


def _share_memory(embeddings: Tensor, ref_emb: Tensor) -> bool:
    """Whether both are rows of one tensor, so that a query can be one of the references."""
    one, other = embeddings.untyped_storage().data_ptr(), ref_emb.untyped_storage().data_ptr()
    alike = embeddings.dtype == ref_emb.dtype and embeddings.stride()[1:] == ref_emb.stride()[1:]
    return one == other != 0 and alike and embeddings.stride()[0] != 0 != ref_emb.stride()[0]


def check_labels(name: str, labels: Tensor | None) -> None:
    """Integers, where there are any: as floats two large ones can be the same."""
    if labels is None:
        return
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"{name} must be a tensor of integers, got {got}")
