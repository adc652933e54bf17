"""The losses inside pytorch-metric-learning: what is ranked, what the host's parts do with them, memory, resume."""

import copy
import os
import pickle

import numpy as np
import oracles
import pytest
import torch
import torch.multiprocessing
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers, trainers
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

from rambo_plugins import core, pml
from rambo_plugins.pml import (
    PAPER_PRESETS,
    RamboAPLoss,
    RamboCrossBatchMemory,
    RamboRecallLoss,
    RamboSelfSupervisedLoss,
)

LOSSES = {RamboRecallLoss: oracles.recall_item("log"), RamboAPLoss: oracles.ap_item}
both = pytest.mark.parametrize("loss_class", LOSSES)


def batch(seed, size=24, dim=5, classes=6):
    """Unequal classes; label 99 and 98 are alone."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    labels = (torch.rand(size, generator=generator) ** 2 * classes).long()
    labels[:2] = torch.tensor([99, 98])
    return embeddings, labels


def expected(scores, relevance, mask, loss_class, **options):
    """Mean over the queries with a relevant item, and its gradient to the scores."""
    values, shares, grads = oracles.rank_loss(
        scores.tolist(), relevance.tolist(), LOSSES[loss_class], mask=mask.tolist(), **options
    )
    return sum(s * v for s, v in zip(shares, values, strict=True)), np.array(grads)


def check(loss_fn, embeddings, arguments, scores_of, relevance, mask):
    """The loss and the gradient to the embeddings are those of the oracle, through the scores written out."""
    leaf = embeddings.clone().requires_grad_()
    loss = loss_fn(leaf, *arguments)
    loss.backward()
    other = embeddings.clone().requires_grad_()
    scores = scores_of(other)
    value, grad = expected(
        scores.detach(), relevance, mask, type(loss_fn), lambda_val=loss_fn.lambda_val, margin=loss_fn.margin
    )
    scores.backward(torch.tensor(grad))
    assert loss.item() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(leaf.grad, other.grad)
    assert other.grad.abs().max() > 0


def cosine(queries, references):
    return torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(references).T


SCORES = {
    "cosine": (distances.CosineSimilarity(), cosine),
    "dot": (distances.DotProductSimilarity(normalize_embeddings=False), lambda q, r: q @ r.T),
    "squared": (
        distances.LpDistance(normalize_embeddings=False, power=2),
        lambda q, r: -((q[:, None] - r[None]) ** 2).sum(-1),
    ),
}


@both
@pytest.mark.parametrize("distance", SCORES)
def test_a_batch_ranks_itself_without_the_query(loss_class, distance):
    host_distance, similarity = SCORES[distance]
    embeddings, labels = batch(0)
    relevance, mask = labels[:, None] == labels[None], ~torch.eye(24, dtype=torch.bool)
    loss_fn = loss_class(5.0, 0.1, distance=host_distance)
    check(loss_fn, embeddings, (labels,), lambda e: similarity(e, e), relevance, mask)


@both
def test_references_are_ranked_whole(loss_class):
    (embeddings, labels), (references, ref_labels) = batch(0), batch(1, size=30)
    relevance = labels[:, None] == ref_labels[None]
    arguments = (labels, None, references, ref_labels)
    check(loss_class(5.0, 0.1), embeddings, arguments, lambda e: cosine(e, references), relevance, relevance | True)


def all_pairs(labels, ref_labels):
    same = labels[:, None] == ref_labels[None]
    return (*torch.where(same), *torch.where(~same))


@both
@pytest.mark.parametrize("labels_of", ["one tensor", "a clone"])
def test_a_second_view_is_ranked_whole_whichever_tensor_its_labels_are(loss_class, labels_of):
    first, second = batch(0)[0], batch(1)[0]
    labels = torch.arange(24)
    ref_labels = labels if labels_of == "one tensor" else labels.clone()
    relevance = torch.eye(24, dtype=torch.bool)
    loss_fn = loss_class(50.0, 0.1)
    check(loss_fn, first, (labels, None, second, ref_labels), lambda e: cosine(e, second), relevance, relevance | True)
    # Both views from one pass of a network: one tensor holds the rows of both.
    for views in (torch.cat([first, second]).chunk(2), torch.stack([first, second], 1).unbind(1)):
        expected = loss_class(50.0, 0.1)(first, labels, ref_emb=second, ref_labels=labels.clone())
        assert loss_fn(views[0], labels, ref_emb=views[1], ref_labels=ref_labels) == expected
    arguments = (labels, all_pairs(labels, labels), second, ref_labels)
    check(loss_fn, first, arguments, lambda e: cosine(e, second), relevance, relevance | True)


VIEWS = {  # the references, by the batch; and where its embeddings are among them
    "the same": (lambda e: e, range(24)),
    "a slice of all": (lambda e: e[:], range(24)),
    "a view": (lambda e: e.view(e.shape), range(24)),
    "detached": (lambda e: e.detach(), range(24)),
    "a part": (lambda e: e[4:20], [None] * 4 + list(range(16)) + [None] * 4),
    "every other": (lambda e: e[::2], [i // 2 if i % 2 == 0 else None for i in range(24)]),
    "a clone": (lambda e: e.clone(), [None] * 24),
}


@both
@pytest.mark.parametrize("labels_of", ["one tensor", "a clone", "a miner's pairs"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_query_leaves_itself_out_by_its_place_in_memory(loss_class, view, labels_of):
    embeddings, labels = batch(0)
    view_of, places = VIEWS[view]
    ref_labels = labels if labels_of == "one tensor" and len(view_of(labels)) == 24 else view_of(labels).clone()
    relevance = labels[:, None] == ref_labels[None]
    mask = torch.ones_like(relevance)
    for i, place in enumerate(places):
        if place is not None:
            mask[i, place] = False
    value, _ = expected(
        cosine(embeddings, view_of(embeddings)), relevance, mask, loss_class, lambda_val=5.0, margin=0.1
    )
    tuples = all_pairs(labels, ref_labels) if labels_of == "a miner's pairs" else None  # each with itself among them
    leaf = embeddings.clone().requires_grad_()
    loss = loss_class(5.0, 0.1)(leaf, labels, tuples, ref_emb=view_of(leaf), ref_labels=ref_labels)
    assert loss.item() == pytest.approx(value)


def test_queries_that_are_a_part_of_the_references_leave_themselves_out():
    embeddings, labels = batch(0)
    relevance, mask = labels[8:16, None] == labels[None], torch.ones(8, 24, dtype=torch.bool)
    for i in range(8):
        mask[i, 8 + i] = False
    value, _ = expected(cosine(embeddings[8:16], embeddings), relevance, mask, RamboAPLoss, lambda_val=5.0, margin=0.1)
    loss = RamboAPLoss(5.0, 0.1)(embeddings[8:16], labels[8:16], ref_emb=embeddings, ref_labels=labels)
    assert loss.item() == pytest.approx(value)


def test_the_hosts_miners_and_its_efficient_wrapper_drop_second_views_before_a_loss_sees_them():
    """What README.md warns of; should the host mend it, the warning can go."""
    (first, _), (second, _), labels = batch(0), batch(1), torch.arange(24)
    miner = miners.BatchEasyHardMiner(pos_strategy="all", neg_strategy="all")
    assert len(miner(first, labels, second, labels)[0]) == 0
    pairs = miner(first, labels, second, labels.clone())
    assert len(pairs[0]) == 24
    assert RamboAPLoss()(first, labels, pairs, second, labels).item() > 0
    wrapped = lmu.remove_self_comparisons(lmu.get_all_pairs_indices(labels, labels.clone()), torch.arange(24), 48)
    assert len(wrapped[0]) == 0


@both
@pytest.mark.parametrize("miner", [miners.MultiSimilarityMiner(), miners.TripletMarginMiner(margin=0.3)])
def test_tuples_of_a_miner_are_masks(loss_class, miner):
    embeddings, labels = batch(2)
    tuples = miner(embeddings, labels)
    relevance, mask = torch.zeros(24, 24, dtype=torch.bool), torch.zeros(24, 24, dtype=torch.bool)
    a1, p, a2, n = tuples if len(tuples) == 4 else (tuples[0], tuples[1], tuples[0], tuples[2])
    for i, j in zip(a1.tolist(), p.tolist(), strict=True):
        relevance[i, j] = mask[i, j] = True
    for i, j in zip(a2.tolist(), n.tolist(), strict=True):
        mask[i, j] = True
    assert 0 < mask.sum() < 24 * 23
    for with_labels in (labels, None):
        check(loss_class(5.0, 0.1), embeddings, (with_labels, tuples), lambda e: cosine(e, e), relevance, mask)


@both
def test_reducers_change_the_factor_and_not_lambda(loss_class):
    embeddings, labels = batch(3)
    counts = torch.bincount(labels, minlength=100)[labels]

    def run(reducer):
        leaf = embeddings.clone().requires_grad_()
        loss = loss_class(5.0, 0.1, reducer=reducer)(leaf, labels)
        if isinstance(loss, dict):
            per_query = loss["loss"]
            assert per_query["reduction_type"] == "element"
            assert torch.equal(per_query["indices"], torch.where(counts > 1)[0])
            loss = per_query["losses"].sum()
        loss.backward()
        return loss.item(), leaf.grad

    mean, mean_grad = run(None)
    assert mean_grad.abs().max() > 0
    num_queries = (counts > 1).sum()
    for reducer in (reducers.SumReducer(), reducers.DoNothingReducer()):
        value, grad = run(reducer)
        assert value == pytest.approx(mean * num_queries)
        torch.testing.assert_close(grad, mean_grad * num_queries)
    for reducer in (reducers.PerAnchorReducer(), reducers.ClassWeightedReducer(torch.ones(100))):
        torch.testing.assert_close(run(reducer)[1], mean_grad)
    per_query = loss_class(5.0, 0.1, reducer=reducers.DoNothingReducer())(embeddings, labels)["loss"]["losses"]
    middle = per_query.median().item()
    expected_mean = per_query[per_query > middle].mean().item()
    assert run(reducers.ThresholdReducer(low=middle))[0] == pytest.approx(expected_mean)
    assert run(reducers.AvgNonZeroReducer())[0] >= mean


@both
def test_an_embedding_regulariser_adds_its_loss(loss_class):
    embeddings, labels = batch(4)
    plain = loss_class()(embeddings, labels)
    for use_labels in (labels, torch.arange(24)):
        loss_fn = loss_class(embedding_regularizer=regularizers.LpRegularizer(), embedding_reg_weight=0.5)
        extra = 0.5 * embeddings.norm(dim=1).mean()
        base = plain if use_labels is labels else 0
        torch.testing.assert_close(loss_fn(embeddings, use_labels), base + extra)


@both
def test_a_batch_without_a_positive_is_a_zero_in_the_graph(loss_class):
    embeddings = batch(5)[0].requires_grad_()
    for reducer in (None, reducers.SumReducer(), reducers.ThresholdReducer(low=0.1), reducers.PerAnchorReducer()):
        loss = loss_class(reducer=reducer)(embeddings, torch.arange(24))
        loss.backward()
        assert loss.item() == 0
    assert torch.equal(embeddings.grad, torch.zeros_like(embeddings))
    empty = tuple(torch.zeros(0, dtype=torch.int64) for _ in range(4))
    assert loss_class()(embeddings, None, empty).item() == 0


@both
def test_half_precision_embeddings(loss_class):
    embeddings, labels = batch(6, size=64)
    leaf = embeddings.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_class(5.0, 0.1)(leaf * 1.0, labels)
    loss.backward()
    assert leaf.grad.dtype == torch.bfloat16
    assert leaf.grad.isfinite().all()
    assert leaf.grad.abs().max() > 0


@both
class TestMemory:
    def test_the_last_batches_extend_the_gallery(self, loss_class):
        loss_fn, batches = loss_class(5.0, 0.1, memory=2), [batch(seed, size=20 + seed) for seed in range(5)]
        for step, (embeddings, labels) in enumerate(batches):
            past = batches[max(0, step - 2) : step]
            gallery = torch.cat([embeddings, *[e for e, _ in past]])
            all_labels = torch.cat([labels, *[y for _, y in past]])
            mask = torch.ones(len(labels), len(all_labels), dtype=torch.bool).fill_diagonal_(False)
            constants = gallery[len(labels) :]
            check(
                loss_fn,
                embeddings,
                (labels,),
                lambda e, constants=constants: cosine(e, torch.cat([e, constants])),
                labels[:, None] == all_labels[None],
                mask,
            )
        assert len(loss_fn.memory) == 23 + 24

    def test_it_is_left_alone_without_gradients_and_in_evaluation(self, loss_class):
        loss_fn, (embeddings, labels) = loss_class(memory=2), batch(0)
        plain = loss_class()(embeddings, labels)
        with torch.no_grad():
            loss_fn(embeddings.requires_grad_(), labels)
        assert len(loss_fn.memory) == 0
        loss_fn(embeddings, labels)
        assert len(loss_fn.memory) == 24
        loss_fn.eval()
        assert loss_fn(embeddings, labels).item() == plain.item()
        assert len(loss_fn.memory) == 24

    def test_warmup_fills_but_does_not_use_it(self, loss_class):
        loss_fn = loss_class(memory=3, memory_warmup=2)
        for seed in range(4):
            embeddings, labels = batch(seed)
            loss = loss_fn(embeddings.requires_grad_(), labels)
            assert (loss.item() == loss_class()(embeddings, labels).item()) == (seed <= 2), seed
        loss_fn.memory.reset()
        assert len(loss_fn.memory) == 0

    def test_it_is_in_the_checkpoint(self, loss_class, tmp_path):
        first = loss_class(memory=3, memory_warmup=1)
        for seed in range(3):
            embeddings, labels = batch(seed, size=20 + seed)
            first(embeddings.requires_grad_(), labels)
        torch.save(first.state_dict(), tmp_path / "loss.pt")
        second = loss_class(memory=3, memory_warmup=1)
        second.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
        for seed in range(3, 8):
            embeddings, labels = batch(seed)
            embeddings.requires_grad_()
            assert torch.equal(first(embeddings, labels), second(embeddings, labels))
        fresh, shorter = loss_class(memory=3), loss_class(memory=1)
        fresh.load_state_dict(loss_class(memory=3).state_dict())  # an empty memory
        shorter.load_state_dict(first.state_dict())  # keeps the last batch
        assert len(shorter.memory) == 24
        with pytest.raises(RuntimeError, match=r"Missing key.*memory"):
            fresh.load_state_dict({})
        with pytest.raises(RuntimeError, match=r"Unexpected key.*memory"):
            loss_class().load_state_dict(first.state_dict())

    @pytest.mark.parametrize("miner", [miners.MultiSimilarityMiner(), miners.TripletMarginMiner(margin=0.3)])
    def test_all_of_it_is_ranked_with_a_miner_that_has_not_seen_it(self, loss_class, miner):
        loss_fn, (past, past_labels), (embeddings, labels) = loss_class(5.0, 0.1, memory=2), batch(0), batch(1)
        loss_fn(past.clone().requires_grad_(), past_labels)
        tuples = miner(embeddings, labels)
        relevance, mask = torch.zeros(24, 48, dtype=torch.bool), torch.zeros(24, 48, dtype=torch.bool)
        mask[:, 24:] = True
        relevance[:, 24:] = labels[:, None] == past_labels[None]
        a1, p, a2, n = tuples if len(tuples) == 4 else (tuples[0], tuples[1], tuples[0], tuples[2])
        for i, j in zip(a1.tolist(), p.tolist(), strict=True):
            relevance[i, j] = mask[i, j] = True
        for i, j in zip(a2.tolist(), n.tolist(), strict=True):
            mask[i, j] = True
        assert not mask[:, :24].all()
        check(loss_fn, embeddings, (labels, tuples), lambda e: cosine(e, torch.cat([e, past])), relevance, mask)

    def test_a_pass_that_raises_leaves_it_as_it_was(self, loss_class):
        class Fails(reducers.MeanReducer):
            def element_reduction(self, losses, *arguments):
                if self.failing:
                    raise MemoryError
                return super().element_reduction(losses, *arguments)

        loss_fn, untouched = loss_class(memory=2, reducer=Fails()), loss_class(memory=2)
        loss_fn.reducer.failing = False
        for loss in (loss_fn, untouched):
            loss(batch(0)[0].requires_grad_(), batch(0)[1])
        embeddings, labels = batch(1)
        embeddings[3] = torch.nan
        with pytest.raises(ValueError, match="NaN"):
            loss_fn(embeddings.requires_grad_(), labels)
        loss_fn.reducer.failing = True
        with pytest.raises(MemoryError):
            loss_fn(batch(1)[0].requires_grad_(), labels)
        loss_fn.reducer.failing = False
        state = loss_fn.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in untouched.state_dict().items())
        assert loss_fn(batch(2)[0].requires_grad_(), labels) == untouched(batch(2)[0].requires_grad_(), labels)

    def test_a_copy_goes_on_with_its_own(self, loss_class):
        first = loss_class(5.0, 0.1, memory=2)
        for seed in range(2):
            first(batch(seed)[0].requires_grad_(), batch(seed)[1])
        copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first)), loss_class(5.0, 0.1, memory=2)]
        copies[2].load_state_dict(first.state_dict(), strict=True)
        for seed in range(2, 5):
            embeddings, labels = batch(seed)
            expected = first(embeddings.clone().requires_grad_(), labels)
            for other in copies:
                assert torch.equal(other(embeddings.clone().requires_grad_(), labels), expected)

    def test_misuse_is_named(self, loss_class):
        embeddings, labels = batch(0)
        tuples = miners.MultiSimilarityMiner()(embeddings, labels)
        with pytest.raises(ValueError, match="memory of 2 batches needs labels"):
            loss_class(memory=2)(embeddings, None, tuples)
        with pytest.raises(ValueError, match="memory must be an integer >= 0, got -1"):
            loss_class(memory=-1)
        loss_fn = loss_class(memory=2)
        loss_fn(embeddings.requires_grad_(), labels)
        with pytest.raises(ValueError, match=r"holds items of shapes \[\(5,\), \(\)\], got \[\(6,\), \(\)\]"):
            loss_fn(torch.randn(24, 6, dtype=torch.float64, requires_grad=True), labels)


@both
def test_statistics_are_collected_when_asked_for(loss_class):
    embeddings = torch.tensor([[3.0], [2.0], [1.0], [-1.0]], requires_grad=True)
    labels, distance = torch.tensor([0, 1, 0, 1]), distances.DotProductSimilarity(normalize_embeddings=False)
    # The products by hand: above the one relevant item of each query stand 1, 2, 0 and 1 irrelevant ones.
    for lambda_val, share_zero_gradient in ((1e-6, 1.0), (1e3, 0.25)):
        loss_fn = loss_class(lambda_val, 0.0, distance=distance, collect_stats=True)
        loss_fn(embeddings, labels)
        assert (loss_fn.mean_r, loss_fn.share_perfect) == (1.0, 0.25)
        assert loss_fn.share_zero_gradient == share_zero_gradient
    stats = {"share_with_positive", "mean_r", "share_perfect", "share_zero_gradient"}
    assert stats <= set(loss_fn._record_these_stats)
    assert not stats & set(vars(loss_class()))
    # Two of four queries have a positive; none has.
    for labels, share in ((torch.tensor([0, 0, 1, 2]), 0.5), (torch.arange(4), 0.0)):
        loss = loss_fn(embeddings, labels)
        assert loss_fn.share_with_positive == share
        assert loss.requires_grad


@both
@pytest.mark.parametrize("margin", [0.1, (0.0, 0.1)])
@pytest.mark.parametrize("memory", [0, 2])
def test_a_lambda_that_moves_nothing_is_visible_in_the_statistics(loss_class, margin, memory):
    for lambda_val, moves in ((1e-9, False), (50.0, True)):
        loss_fn = loss_class(lambda_val, margin, memory=memory, collect_stats=True)
        for seed in range(3):
            embeddings, labels = batch(seed)
            loss_fn(embeddings.requires_grad_(), labels).backward()
            assert embeddings.grad.any() == moves
            assert (loss_fn.share_zero_gradient == 1) == (not moves)


def test_presets_hold_the_papers_numbers():
    assert {name: (p["lambda_val"], p["margin"], p["memory"]) for name, p in PAPER_PRESETS.items()} == {
        "sop": (4.0, 0.02, 3),
        "inshop": (0.2, 0.05, 3),
        "cub": (0.2, 0.02, 3),
    }
    for preset in PAPER_PRESETS.values():
        loss_fn = RamboRecallLoss(**preset)
        loss_fn(*batch(0)).item()


@both
def test_bad_arguments_are_named(loss_class):
    with pytest.raises(TypeError, match="lamda"):
        loss_class(lamda=3)
    with pytest.raises(ValueError, match="lambda_val must be a finite number > 0"):
        loss_class(lambda_val=0)
    with pytest.raises(ValueError, match="lambda_per"):
        loss_class(lambda_per="image")
    with pytest.raises(ValueError, match="labels and indices_tuple cannot both be None"):
        loss_class()(batch(0)[0])
    with pytest.raises(ValueError, match="ref_emb needs ref_labels"):
        loss_class()(*batch(0), None, batch(0)[0])
    with pytest.raises(ValueError, match="ref_labels need the ref_emb"):
        loss_class()(*batch(0), None, None, batch(0)[1])
    with pytest.raises(ValueError, match="distributed_grad is for DistributedLossWrapper"):
        loss_class(distributed_grad=True)(*batch(0))
    for option in ("normalize", "rank_plus_grad", "distributed_grad"):
        with pytest.raises(TypeError, match=f"{option} must be True or False, got 'no'"):
            loss_class(**{option: "no"})
    for option in ("memory", "memory_warmup"):
        for value in (True, 1.0, "1", -1, np.float32(1), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=f"{option} must be an integer >= 0"):
                loss_class(**{option: value})


@both
def test_numbers_of_numpy_and_torch_are_numbers(loss_class):
    embeddings, labels = batch(0)
    margins = np.linspace(0, 0.2, 3)
    plain = loss_class(4.0, margins.tolist(), memory=2, memory_warmup=0)
    other = loss_class(np.float32(4), margins, memory=np.int64(2), memory_warmup=torch.tensor(0))
    assert other.margin == plain.margin == tuple(margins.tolist())
    for loss_fn in (loss_class(np.float32(4), torch.tensor(0.25)), loss_class(torch.tensor(4), np.float16(0.25))):
        assert {name: type(getattr(loss_fn, name)) for name in loss_fn._record_these} == {
            "lambda_val": float,
            "margin": float,
        }
        assert loss_fn(embeddings, labels) == loss_class(4.0, 0.25)(embeddings, labels)
    for seed in range(4):
        losses = [loss_fn(batch(seed)[0].requires_grad_(), batch(seed)[1]) for loss_fn in (plain, other)]
        assert losses[0] == losses[1]
        assert len(plain.memory) == len(other.memory)


@both
def test_labels_are_integers(loss_class):
    """As float32, 16,777,216 and 16,777,217 are one number."""
    embeddings, labels = batch(0)
    large = torch.where(labels == 0, 2**24, 2**24 + 1)
    queue = RamboCrossBatchMemory(loss_class(), 5, memory_size=64).double()
    for loss_fn in (loss_class(), queue):
        assert loss_fn(embeddings, large) == loss_fn(embeddings, large.int()) or loss_fn is queue
        for bad in (large.float(), torch.full((24,), torch.nan), labels.bfloat16(), labels.numpy(), labels.tolist()):
            with pytest.raises(TypeError, match="labels must be a tensor of integers, got"):
                loss_fn(embeddings, bad)
    assert loss_class()(embeddings, labels) == loss_class()(embeddings, labels.to(torch.uint8))
    with pytest.raises(TypeError, match=r"ref_labels must be a tensor of integers, got torch\.float32"):
        loss_class()(embeddings, labels, None, embeddings, labels.float())


@both
def test_the_queue_of_a_cross_batch_memory_is_as_it_was_after_a_pass_that_raised(loss_class):
    def made():
        return RamboCrossBatchMemory(loss_class(), 5, memory_size=40).double()

    wrapper, untouched = made(), made()
    bad, labels = batch(9)
    bad[5] = torch.nan
    for step in range(4):  # before it is full, at its end, and when it is full
        with pytest.raises(ValueError, match="NaN"):
            wrapper(bad, labels)
        assert (wrapper.queue_idx, wrapper.has_been_filled) == (untouched.queue_idx, untouched.has_been_filled)
        assert torch.equal(wrapper.embedding_memory, untouched.embedding_memory)
        assert torch.equal(wrapper.label_memory, untouched.label_memory)
        assert wrapper(*batch(step)) == untouched(*batch(step))
    with pytest.raises(ValueError, match=r"give RamboCrossBatchMemory the miner itself, miner=\.\.\., got a tuple"):
        wrapper(*batch(5), miners.MultiSimilarityMiner()(*batch(5)))
    small = batch(5)[1] + 300
    wrapper(batch(5)[0], small)
    wrapper(batch(6)[0], batch(6)[1].to(torch.uint8))  # the labels in the queue stay what they are
    assert wrapper.label_memory.max() >= 300


@both
def test_cross_batch_memory(loss_class):
    with pytest.raises(Exception, match="not supported"):
        losses.CrossBatchMemory(loss_class(), 5)
    with pytest.raises(ValueError, match="memory=0, got memory=3"):
        RamboCrossBatchMemory(loss_class(memory=3), 5)
    RamboCrossBatchMemory(losses.ContrastiveLoss(), 5)
    wrapper, batches = RamboCrossBatchMemory(loss_class(5.0, 0.1), 5, memory_size=64).double(), []
    for step in range(4):
        embeddings, labels = batch(step)
        batches.append((embeddings, labels))
        queue = batches[-2:] if step else batches
        loss = wrapper(embeddings, labels)
        if step < 2:  # not yet wrapped: the queue is the batches in order
            gallery, all_labels = torch.cat([e for e, _ in queue]), torch.cat([y for _, y in queue])
            mask = torch.ones(24, len(all_labels), dtype=torch.bool)
            for i in range(24):
                mask[i, step * 24 + i] = False
            value, _ = expected(
                cosine(embeddings, gallery), labels[:, None] == all_labels[None], mask, loss_class,
                lambda_val=5.0, margin=0.1,
            )  # fmt: skip
            assert loss.item() == pytest.approx(value)
    copy = RamboCrossBatchMemory(loss_class(5.0, 0.1), 5, memory_size=64).double()
    copy.load_state_dict(wrapper.state_dict())
    assert (copy.queue_idx, copy.has_been_filled) == (wrapper.queue_idx, wrapper.has_been_filled) == (32, True)
    for step in range(4, 7):
        assert torch.equal(wrapper(*batch(step)), copy(*batch(step)))
    mined = RamboCrossBatchMemory(loss_class(), 5, memory_size=64, miner=miners.MultiSimilarityMiner()).double()
    assert mined(*batch(0)).item() > 0


@both
@pytest.mark.parametrize("symmetric", [True, False])
def test_self_supervised_wrapper(loss_class, symmetric):
    with pytest.raises(Exception, match="not supported"):
        losses.SelfSupervisedLoss(loss_class())
    with pytest.raises(ValueError, match="memory=0, got memory=3"):
        RamboSelfSupervisedLoss(loss_class(memory=3), symmetric=symmetric)
    one, two = batch(0)[0], batch(1)[0]
    loss = RamboSelfSupervisedLoss(loss_class(5.0, 0.1), symmetric=symmetric)(one, two)
    index = torch.arange(24)
    if symmetric:
        queries, gallery, labels = torch.cat([one, two]), torch.cat([one, two]), torch.cat([index, index])
        mask = ~torch.eye(48, dtype=torch.bool)
    else:
        queries, gallery, labels, mask = one, two, index, torch.ones(24, 24, dtype=torch.bool)
    relevance = labels[:, None] == labels[None]
    value, _ = expected(cosine(queries, gallery), relevance, mask, loss_class, lambda_val=5.0, margin=0.1)
    assert loss.item() == pytest.approx(value)


def train(folder, stop_after=None, resume=False, epochs=4):
    """PML's own trainer on a toy set, its state saved after each epoch; returns the final weights."""
    torch.manual_seed(0)
    data = torch.randn(60, 8)
    dataset = torch.utils.data.TensorDataset(data, torch.arange(60) % 10)
    trunk = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(trunk.parameters(), lr=0.01)
    loss_fn = RamboRecallLoss(4.0, 0.1, memory=2)
    state, start = {"trunk": trunk, "optimizer": optimizer, "loss": loss_fn}, 1
    if resume:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        for name, part in state.items():
            part.load_state_dict(saved[name])
        start = saved["epoch"] + 1
    for epoch in range(start, (stop_after or epochs) + 1):
        torch.manual_seed(epoch)
        trainer = trainers.MetricLossOnly(
            {"trunk": trunk}, {"trunk_optimizer": optimizer}, 20, {"metric_loss": loss_fn}, dataset,
            dataloader_num_workers=0, data_device=torch.device("cpu"),
        )  # fmt: skip
        trainer.train(epoch, epoch)
        torch.save(
            {"epoch": epoch, **{name: part.state_dict() for name, part in state.items()}}, folder / "checkpoint.pt"
        )
    return trunk.state_dict()


def test_resumed_training_in_the_hosts_trainer_ends_bit_identical(tmp_path):
    whole = train(tmp_path)
    train(tmp_path, stop_after=2)
    resumed = train(tmp_path, resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["loss"]["memory.field0"].shape == (40, 4)


WORLD = 2


def distributed_problem():
    torch.manual_seed(0)
    inputs, labels = torch.randn(32, 6, dtype=torch.float64), torch.arange(32) % 5
    model = torch.nn.Linear(6, 4).double()
    return model, inputs, labels


def second_views():
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES = {
    (loss_class.__name__, *mode): (loss_class, *mode)
    for loss_class in LOSSES
    for mode in [("full", "batch"), ("full, two views", "batch"), ("efficient", "row"),
                 ("efficient and connected", "batch"), ("efficient and connected", "row")]
}  # fmt: skip


def distributed_worker(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    grads = {}
    for name, (loss_class, mode, lambda_per) in CASES.items():
        model, inputs, labels = distributed_problem()
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        own = slice(rank * 16, (rank + 1) * 16)
        loss_fn = loss_class(5.0, 0.1, lambda_per=lambda_per, distributed_grad="connected" in mode)
        wrapper = DistributedLossWrapper(loss_fn, efficient="efficient" in mode)
        own_labels = labels[own]
        views = {"ref_emb": second_views()[own], "ref_labels": own_labels} if "two views" in mode else {}
        wrapper(parallel(inputs[own]), own_labels, **views).backward()
        grads[name] = model.weight.grad
    torch.save(grads, f"{folder}/grads{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's destructor can wait for a thread that waits for Python's lock, and never end


@pytest.fixture(scope="module")
def distributed_grads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(distributed_worker, (str(folder),), nprocs=WORLD)
    grads = [torch.load(folder / f"grads{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for name in CASES:
        torch.testing.assert_close(grads[0][name], grads[1][name])
    return grads[0]


def whole_batch_grad(loss_fn):
    model, inputs, labels = distributed_problem()
    loss_fn(model(inputs), labels).backward()
    assert model.weight.grad.abs().max() > 0
    return model.weight.grad


@both
class TestTwoProcesses:
    """Against one process with the whole batch, after DistributedDataParallel's mean over the processes."""

    def test_full_mode_has_its_gradient(self, loss_class, distributed_grads):
        grad = distributed_grads[loss_class.__name__, "full", "batch"]
        torch.testing.assert_close(grad, whole_batch_grad(loss_class(5.0, 0.1)))

    def test_full_mode_has_it_for_two_views_with_one_tensor_of_labels(self, loss_class, distributed_grads):
        grad = distributed_grads[loss_class.__name__, "full, two views", "batch"]
        labels = distributed_problem()[2]

        def of_two_views(embeddings, _):
            return loss_class(5.0, 0.1)(embeddings, labels, ref_emb=second_views(), ref_labels=labels)

        torch.testing.assert_close(grad, whole_batch_grad(of_two_views))

    @pytest.mark.parametrize("lambda_per", ["batch", "row"])
    def test_efficient_mode_has_it_times_the_processes(self, loss_class, lambda_per, distributed_grads):
        grad = distributed_grads[loss_class.__name__, "efficient and connected", lambda_per]
        torch.testing.assert_close(grad, WORLD * whole_batch_grad(loss_class(5.0, 0.1, lambda_per=lambda_per)))

    def test_efficient_mode_alone_leaves_out_the_gradient_of_gathered_references(self, loss_class, distributed_grads):
        grad = distributed_grads[loss_class.__name__, "efficient", "row"]

        def loss_with_constants(embeddings, labels):
            total = 0
            for own in (slice(0, 16), slice(16, 32)):
                gallery = embeddings.detach().clone()
                gallery[own] = embeddings[own]
                pairs = c_f.torch_arange_from_size(embeddings)[own]
                same = labels[own][:, None] == labels[None]
                not_self = pairs[:, None] != torch.arange(32)[None]
                tuples = (*torch.where(same & not_self), *torch.where(~same))
                loss_fn = loss_class(5.0, 0.1, lambda_per="row")
                total = total + loss_fn(embeddings[own], labels[own], tuples, gallery, labels) / 2
            return total

        torch.testing.assert_close(grad, WORLD * whole_batch_grad(loss_with_constants))
        assert not torch.allclose(grad, WORLD * whole_batch_grad(loss_class(5.0, 0.1, lambda_per="row")))


@pytest.mark.parametrize("loss_class", [RamboRecallLoss, RamboAPLoss])
def test_several_margins_are_the_mean_over_them(loss_class):
    embeddings = torch.randn(24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(24) % 6

    def outcome(margin):
        leaf = embeddings.clone().requires_grad_()
        loss = loss_class(lambda_val=4.0, margin=margin)(leaf, labels)
        loss.backward()
        return torch.cat([loss.detach()[None], leaf.grad.flatten()])

    torch.testing.assert_close(outcome((0.0, 0.2, 0.6)), (outcome(0.0) + outcome(0.2) + outcome(0.6)) / 3)
    assert not torch.allclose(outcome(0.0), outcome(0.6))
    assert "margin" in loss_class(margin=0.1)._record_these
    assert "margin" not in loss_class(margin=(0.1, 0.2))._record_these  # a record keeper takes numbers


MADE = {
    "RamboAPLoss": lambda: RamboAPLoss(5.0, 0.1, memory=2),
    "RamboRecallLoss": lambda: RamboRecallLoss(5.0, np.linspace(0, 0.2, 3), weighting=[1.0, 0.5, 0.25], memory=2),
    "RamboCrossBatchMemory": lambda: RamboCrossBatchMemory(
        RamboRecallLoss(5.0), 5, memory_size=64, miner=miners.MultiSimilarityMiner()
    ).double(),
    "RamboSelfSupervisedLoss": lambda: RamboSelfSupervisedLoss(RamboRecallLoss(5.0, weighting="loglog")),
    "RecallLoss": lambda: core.RecallLoss(lambda_val=5.0, margin=0.1, generator=torch.Generator().manual_seed(1)),
    "ScoreMemory": lambda: core.ScoreMemory(2),
}


def a_step(name, module, seed):
    embeddings, labels = batch(seed)
    if name == "RamboSelfSupervisedLoss":
        return module(embeddings, batch(seed + 100)[0])
    if name == "RecallLoss":
        return module(embeddings, embeddings > 0.5)
    if name == "ScoreMemory":
        return module.extend(embeddings.requires_grad_(), labels)[0].detach().sum()
    return module(embeddings.requires_grad_(), labels).detach()


def process_worker(rank, modules, folder):
    torch.save({name: a_step(name, module, 2) for name, module in modules.items()}, f"{folder}/losses.pt")


def test_every_loss_goes_through_pickle_copies_and_another_process_with_what_it_holds(tmp_path):
    public = {name for name in pml.__all__ if isinstance(getattr(pml, name), type)}
    assert {name for name in public if issubclass(getattr(pml, name), torch.nn.Module)} <= set(MADE)
    modules = {name: make() for name, make in MADE.items()}
    for name, module in modules.items():
        for seed in range(2):
            a_step(name, module, seed)
    copies = [copy.deepcopy(modules), pickle.loads(pickle.dumps(modules))]
    torch.save(modules, tmp_path / "modules.pt")
    copies.append(torch.load(tmp_path / "modules.pt", weights_only=False))
    torch.multiprocessing.spawn(process_worker, (modules, str(tmp_path)), nprocs=1)
    elsewhere = torch.load(tmp_path / "losses.pt")
    for name, module in modules.items():
        loss = a_step(name, module, 2)
        assert loss != 0
        assert torch.equal(elsewhere[name], loss), name
        assert all(torch.equal(a_step(name, other[name], 2), loss) for other in copies), name
