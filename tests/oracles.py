"""Slow, obvious definitions of the ranks, the losses and the blackbox gradient: Python loops in float64.

Written from the paper's equations and the conventions of the README; nothing here calls the package.
"""

import math


def ranks_by_index(scores):
    """Rank 1 for the highest; among equals the lower index first (None: the item does not exist)."""
    ranks = []
    for i, s in enumerate(scores):
        if s is None:
            ranks.append(None)
            continue
        rank = 1
        for j, t in enumerate(scores):
            if t is not None and (t > s or (t == s and j < i)):
                rank += 1
        ranks.append(rank)
    return ranks


def ranks_in_loss(scores, relevance):
    """Like ``ranks_by_index``, but among equals every irrelevant item comes before every relevant one."""
    ranks = []
    for i, s in enumerate(scores):
        if s is None:
            ranks.append(None)
            continue
        rank = 1
        for j, t in enumerate(scores):
            if t is None or j == i:
                continue
            if t > s:
                rank += 1
            elif t == s:
                if relevance[j] == relevance[i]:
                    rank += j < i
                else:
                    rank += relevance[i]
        ranks.append(rank)
    return ranks


def recall_item(weighting):
    """(loss, d loss / d rank, d loss / d rank⁺) of one relevant item."""

    def item(rank, rank_plus):
        r = rank - rank_plus
        if weighting == "log":
            value, slope = math.log(1 + r), 1 / (1 + r)
        elif weighting == "loglog":
            value, slope = math.log(1 + math.log(1 + r)), 1 / ((1 + math.log(1 + r)) * (1 + r))
        else:
            value = sum(weighting[k] for k in range(min(r, len(weighting))))
            slope = weighting[r] if r < len(weighting) else 0.0
        return value, slope, -slope

    return item


def ap_item(rank, rank_plus):
    return 1 - rank_plus / rank, rank_plus / rank**2, -1 / rank


def rank_loss(
    scores, relevance, item, *, lambda_val, margin=0.0, mask=None, weights=None, normalize=True, lambda_per="batch",
    rank_plus_grad=False,
):  # fmt: skip
    """Losses L_q of the rows, their shares c_q of the mean, and d(Σ c_q L_q)/d scores; lists of lists."""
    num_rows = len(scores)
    mask = mask or [[True] * len(row) for row in scores]
    weights = weights or [1.0] * num_rows
    present = [any(r and m for r, m in zip(relevance[q], mask[q], strict=True)) for q in range(num_rows)]
    total = sum(w for w, p in zip(weights, present, strict=True) if p)
    losses, shares, grads = [], [], []
    for q in range(num_rows):
        share = weights[q] / total if present[q] and total else 0.0
        shares.append(share)
        relevant = [i for i in range(len(scores[q])) if mask[q][i] and relevance[q][i]]
        if not relevant:
            losses.append(0.0)
            grads.append([0.0] * len(scores[q]))
            continue
        y = [
            None if not m else s - margin / 2 if r else s + margin / 2
            for s, r, m in zip(scores[q], relevance[q], mask[q], strict=True)
        ]
        # The gradient of the whole loss, Σ c_q L_q, arrives at the ranks of this row; or of L_q alone, per row.
        upstream = share if lambda_per == "batch" else 1.0
        scale = lambda_val * (sum(mask[q]) if normalize else 1)
        ranks = ranks_in_loss(y, relevance[q])
        only_relevant = [s if i in relevant else None for i, s in enumerate(y)]
        ranks_plus = ranks_by_index(only_relevant)
        to_rank, to_rank_plus = [0.0] * len(y), [0.0] * len(y)
        loss = 0.0
        for i in relevant:
            value, d_rank, d_rank_plus = item(ranks[i], ranks_plus[i])
            loss += value / len(relevant)
            to_rank[i] = upstream * d_rank / len(relevant)
            to_rank_plus[i] = upstream * d_rank_plus / len(relevant)
        losses.append(loss)
        moved = [None if s is None else s + scale * g for s, g in zip(y, to_rank, strict=True)]
        moved_ranks = ranks_in_loss(moved, relevance[q])
        grad = [0.0 if s is None else -(ranks[i] - moved_ranks[i]) / scale for i, s in enumerate(y)]
        if rank_plus_grad:
            moved = [None if s is None else s + scale * g for s, g in zip(only_relevant, to_rank_plus, strict=True)]
            moved_ranks = ranks_by_index(moved)
            for i in relevant:
                grad[i] += -(ranks_plus[i] - moved_ranks[i]) / scale
        grads.append([g * share / upstream if upstream else 0.0 for g in grad])
    return losses, shares, grads


def log_precision_item(rank, rank_plus):
    return -math.log(rank_plus / rank), 1 / rank, -1 / rank_plus


def detection_loss(scores, labels, num_classes, *, lambda_val, margin, map_weight=2.0, apc_weight=1.0, item=ap_item):
    """(mean AP part, AP-over-all part, gradient) of boxes (R, C); Algorithm 1 for what arrives at the ranks of each."""
    num_boxes = len(scores)
    items = [(b, c) for c in range(num_classes) for b in range(num_boxes)]
    present = sorted({label for label in labels if label < num_classes})
    total = map_weight + apc_weight
    # (the boxes and classes that are ranked together, what multiplies their loss)
    groups = [([(b, c) for b, c in items if c == k], map_weight / total / len(present)) for k in present]
    groups.append((items, apc_weight / total if present else 0.0))
    grad = [[0.0] * num_classes for _ in range(num_boxes)]
    losses = []
    for group, factor in groups:
        relevance = [labels[b] == c for b, c in group]
        y = [scores[b][c] + (-margin / 2 if r else margin / 2) for (b, c), r in zip(group, relevance, strict=True)]
        ranks = ranks_in_loss(y, relevance)
        ranks_plus = ranks_by_index([s if r else None for s, r in zip(y, relevance, strict=True)])
        num_relevant = sum(relevance)
        loss, moved = 0.0, list(y)
        for i in range(len(group)):
            if relevance[i]:
                value, slope, _ = item(ranks[i], ranks_plus[i])
                loss += factor * value / num_relevant
                moved[i] += lambda_val * len(group) * factor * slope / num_relevant
        losses.append(loss)
        for (b, c), before, after in zip(group, ranks, ranks_in_loss(moved, relevance), strict=True):
            grad[b][c] += (after - before) / (lambda_val * len(group))
    return sum(losses[:-1]), losses[-1], grad
