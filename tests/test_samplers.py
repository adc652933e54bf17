"""The batches of the super-label sampler against the procedure written out with lists, and what they are for."""

import collections
import json
import logging
import os
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.trainers import MetricLossOnly
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from rambo_plugins.pml import RamboRecallLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler


def written_out(labels, super_labels, images_per_class, batch_size, batches_per_pair, seed, epoch):
    """The procedure, one image at a time. Random draws: the images of each class, then the order of the chunks, super
    class by super class in ascending order, classes in ascending order; last the order of the pairs."""
    generator = np.random.default_rng([seed, epoch])
    rows = []
    for super_class in sorted(set(super_labels)):
        chunks = []
        for label in sorted({labels[i] for i in range(len(labels)) if super_labels[i] == super_class}):
            images = [i for i in range(len(labels)) if labels[i] == label and super_labels[i] == super_class]
            shuffled = list(generator.permutation(images))
            taken = 0
            while taken < len(shuffled):
                chunk = []
                while len(chunk) < min(images_per_class, len(shuffled)):
                    chunk.append(shuffled[taken % len(shuffled)])
                    taken += 1
                chunks.append(chunk)
        rows.append([image for i in generator.permutation(len(chunks)) for image in chunks[i]])

    pairs = [(a, b) for a in range(len(rows)) for b in range(a + 1, len(rows))]
    if not pairs:
        pairs, batches_per_pair = [(0,)], 0
        while batches_per_pair * batch_size < len(rows[0]):
            batches_per_pair += 1
    pointers = [0] * len(rows)
    batches = []
    for p in generator.permutation(len(pairs)):
        for _ in range(batches_per_pair):
            batch = []
            for row in pairs[p]:
                for _ in range(batch_size // len(pairs[p])):
                    batch.append(int(rows[row][pointers[row]]))
                    pointers[row] += 1
                    if pointers[row] == len(rows[row]):
                        pointers[row] = 0
            batches.append(batch)
    return batches


def make_data(class_sizes_by_super, seed=0):
    """(labels, super_labels) as lists, in random order, of classes of these sizes."""
    rows = []
    for super_class, sizes in enumerate(class_sizes_by_super):
        for size in sizes:
            rows += [(len({row[0] for row in rows}), super_class)] * size
    np.random.default_rng(seed).shuffle(rows)
    labels, super_labels = zip(*[tuple(int(value) for value in row) for row in rows], strict=True)
    return list(labels), list(super_labels)


UNEVEN = make_data([[5, 4, 9, 6], [4, 4, 7], [8, 5, 4, 4, 4], [13, 6]])  # no class of fewer than 4 images
SMALL = make_data([[1, 2, 3, 9, 2], [2, 2, 2], [3, 1, 5]])


class TestProcedure:
    @pytest.mark.parametrize("data", [UNEVEN, SMALL], ids=["uneven", "small classes"])
    @pytest.mark.parametrize("images_per_class", [2, 4])
    def test_equals_the_procedure_written_out(self, data, images_per_class):
        sampler = SuperLabelBatchSampler(
            *data, images_per_class=images_per_class, batch_size=16, batches_per_pair=3, seed=7
        )
        for epoch in range(3):
            assert list(sampler) == written_out(*data, images_per_class, 16, 3, 7, epoch)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
        st.integers(2, 4),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(0, 2**40),
    )
    def test_equals_the_procedure_written_out_whatever_the_sizes(self, sizes, images_per_class, chunks, b, epoch):
        data = make_data(sizes)
        batch_size = 2 * images_per_class * chunks
        sampler = SuperLabelBatchSampler(
            *data, images_per_class=images_per_class, batch_size=batch_size, batches_per_pair=b
        )
        sampler.set_epoch(epoch)
        expected = written_out(*data, images_per_class, batch_size, b, 0, epoch)
        assert list(sampler) == expected
        assert len(sampler) == len(expected)

    def test_without_super_labels_equals_the_procedure_written_out_for_one(self):
        labels = UNEVEN[0]
        sampler = SuperLabelBatchSampler(labels, images_per_class=4, batch_size=12)
        expected = written_out(labels, [0] * len(labels), 4, 12, 1, 0, 0)
        assert list(sampler) == expected
        assert len(sampler) == len(expected) == 9  # 25 chunks of 4 in batches of 3

    def test_a_batch_is_whole_chunks_of_two_super_classes(self):
        labels, supers = UNEVEN
        for batch in SuperLabelBatchSampler(labels, supers, images_per_class=4, batch_size=16):
            assert len({supers[i] for i in batch[:8]}) == len({supers[i] for i in batch[8:]}) == 1
            assert supers[batch[0]] != supers[batch[8]]
            for start in range(0, 16, 4):
                chunk = batch[start : start + 4]
                assert len({labels[i] for i in chunk}) == 1
                assert len(set(chunk)) == 4

    def test_every_pair_has_its_batches_in_succession_and_the_order_of_the_pairs_changes(self):
        _, supers = UNEVEN
        sampler = SuperLabelBatchSampler(*UNEVEN, images_per_class=4, batch_size=16, batches_per_pair=3)
        orders = []
        for _ in range(4):
            pairs = [(supers[batch[0]], supers[batch[-1]]) for batch in sampler]
            order = pairs[::3]
            assert pairs == [pair for pair in order for _ in range(3)]
            assert sorted(order) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
            orders.append(order)
        assert len(set(map(tuple, orders))) > 1

    def test_pointers_go_on_through_the_pairs_so_every_image_comes_before_any_chunk_comes_again(self):
        labels, supers = UNEVEN
        batches = list(SuperLabelBatchSampler(labels, supers, images_per_class=4, batch_size=16, batches_per_pair=4))
        for super_class in range(4):
            seen = [i for batch in batches for i in batch if supers[i] == super_class]
            images = [i for i in range(len(labels)) if supers[i] == super_class]
            sizes = collections.Counter(labels[i] for i in images)
            row = sum(-(-size // 4) * 4 for size in sizes.values())
            assert set(seen[:row]) == set(images)
            assert seen[row:] == seen[: len(seen) - row]
            assert len(seen) > row

    def test_no_image_is_repeated_within_a_chunk_of_a_small_class(self):
        labels, supers = make_data([[2] * 20, [3] * 20])
        for batch in SuperLabelBatchSampler(labels, supers, images_per_class=4, batch_size=16, batches_per_pair=3):
            assert len(set(batch)) == 16

    def test_an_image_comes_again_in_a_half_only_after_all_of_a_super_class_with_few(self):
        labels, supers = make_data([[2, 4], [8] * 9])
        (batch,) = SuperLabelBatchSampler(labels, supers, images_per_class=2, batch_size=16, batches_per_pair=1)
        assert set(batch[:6]) == {i for i in range(len(labels)) if supers[i] == 0}
        assert batch[6:8] == batch[:2]

    @pytest.mark.parametrize(("supers", "b", "batches"), [(12, 10, 660), (23, 4, 1012)])
    def test_the_papers_epochs_have_660_and_1012_batches(self, supers, b, batches):
        labels = np.arange(supers * 30) // 6
        sampler = SuperLabelBatchSampler(labels, labels % supers, images_per_class=4, batches_per_pair=b)
        assert len(sampler) == sum(1 for _ in sampler) == batches

    def test_labels_may_be_tensors_arrays_and_lists_of_any_integers(self):
        labels, supers = UNEVEN
        expected = list(SuperLabelBatchSampler(labels, supers, batch_size=16))
        big = np.array(labels, np.uint64) + np.uint64(2**63 - 1)  # beyond what float64 tells apart
        assert list(SuperLabelBatchSampler(torch.tensor(labels), torch.tensor(supers), batch_size=16)) == expected
        assert len(list(SuperLabelBatchSampler(big, np.array(supers, np.int8) - 2, batch_size=16))) == len(expected)
        for batch in SuperLabelBatchSampler(big, supers, batch_size=16):
            assert [len({labels[i] for i in batch[at : at + 4]}) for at in range(0, 16, 4)] == [1] * 4


class TestEpochs:
    def test_an_epoch_depends_on_seed_and_epoch_alone(self):
        def draw(seed, epoch):
            sampler = SuperLabelBatchSampler(*UNEVEN, batch_size=16, seed=seed)
            sampler.set_epoch(epoch)
            return list(sampler)

        first = draw(0, 3)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
        assert draw(0, 3) == first
        assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert draw(1, 3) != first
        assert draw(0, 4) != first
        assert draw(3, 0) != first

    def test_each_iteration_draws_the_next_epoch_unless_it_is_set(self):
        sampler = SuperLabelBatchSampler(*UNEVEN, batch_size=16)
        epochs = [list(sampler) for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        sampler.set_epoch(1)
        assert list(sampler) == epochs[1]
        assert list(sampler) == epochs[2]

    @pytest.mark.parametrize("start", [0, 1, 17, 59, 60])
    def test_the_rest_of_an_interrupted_epoch_is_exactly_the_rest_and_the_next_is_whole(self, start):
        sampler = SuperLabelBatchSampler(*UNEVEN, batch_size=16)
        whole, following = list(sampler), list(sampler)
        resumed = SuperLabelBatchSampler(*UNEVEN, batch_size=16)
        resumed.set_epoch(0, start_batch=start)
        assert len(resumed) == 60
        assert list(resumed) == whole[start:]
        assert list(resumed) == following

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_dataloader_draws_one_epoch_an_iteration(self, workers):
        sampler = SuperLabelBatchSampler(*UNEVEN, batch_size=16, batches_per_pair=1)
        expected = [written_out(*UNEVEN, 4, 16, 1, 0, epoch) for epoch in range(3)]
        loader = DataLoader(
            TensorDataset(torch.arange(len(UNEVEN[0]))),
            batch_sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        assert len(loader) == 6
        assert [[batch.tolist() for (batch,) in loader] for _ in range(2)] == expected[:2]
        next(iter(loader))  # an iteration that is given up
        sampler.set_epoch(1, start_batch=4)
        assert [batch.tolist() for (batch,) in loader] == expected[1][4:]
        assert [batch.tolist() for (batch,) in loader] == expected[2]


class TestProcesses:
    @pytest.mark.parametrize("num_replicas", [2, 4])
    @pytest.mark.parametrize("data", [UNEVEN, (UNEVEN[0], None)], ids=["pairs", "no super labels"])
    def test_shares_of_a_batch_are_equal_and_make_it_up(self, num_replicas, data):
        whole = list(SuperLabelBatchSampler(*data, batch_size=32, batches_per_pair=2))
        shares = [
            list(SuperLabelBatchSampler(*data, batch_size=32, batches_per_pair=2, num_replicas=num_replicas, rank=rank))
            for rank in range(num_replicas)
        ]
        assert [len(share) for share in shares] == [len(whole)] * num_replicas
        labels, supers = data
        for batch, *parts in zip(whole, *shares, strict=True):
            assert sorted(batch) == sorted(i for part in parts for i in part)
            for part in parts:
                assert len(part) == 32 // num_replicas
                halves = [part] if supers is None else [part[: len(part) // 2], part[len(part) // 2 :]]
                for half, supers_of in zip(halves, (batch[0], batch[-1]), strict=False):
                    assert supers is None or {supers[i] for i in half} == {supers[supers_of]}
                for at in range(0, len(part), 4):
                    assert len({labels[i] for i in part[at : at + 4]}) == 1

    def test_a_share_resumes_like_the_whole(self):
        sampler = SuperLabelBatchSampler(*UNEVEN, batch_size=16, num_replicas=2, rank=1)
        whole = list(sampler)
        sampler.set_epoch(0, start_batch=5)
        assert list(sampler) == whole[5:]

    def test_the_process_group_is_the_default(self, tmp_path):
        torch.multiprocessing.spawn(sampling_process, (str(tmp_path),), nprocs=2)
        expected = [
            list(SuperLabelBatchSampler(*UNEVEN, batch_size=16, num_replicas=2, rank=rank)) for rank in range(2)
        ]
        assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == expected
        assert expected[0] != expected[1]


def sampling_process(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(minutes=1)
    )
    batches = list(SuperLabelBatchSampler(*UNEVEN, batch_size=16))
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(batches, file)
    torch.distributed.barrier()
    os._exit(0)  # gloo's destructor can wait for a thread that waits for Python's lock, and never end


class Points(Dataset):
    """Two numbers an image, which tell its index; labels as pytorch-metric-learning expects them."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0]), self.labels[index]


class Seen(torch.nn.Module):
    """The loss, and a note of the batches that it sees."""

    def __init__(self):
        super().__init__()
        self.loss_fn = RamboRecallLoss(lambda_val=4.0, margin=0.02)
        self.labels = []

    def forward(self, embeddings, labels, indices_tuple=None):
        self.labels.append(labels.tolist())
        return self.loss_fn(embeddings, labels, indices_tuple)


class TestTrainers:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_every_batch_that_the_loss_sees_is_one_of_the_samplers(self, workers):
        labels, supers = UNEVEN
        sampler = SuperLabelBatchSampler(labels, supers, images_per_class=4, batch_size=16, batches_per_pair=2, seed=1)
        assert isinstance(sampler, BatchSampler)
        trunk, loss_fn, images = torch.nn.Linear(2, 3), Seen(), []
        trunk.register_forward_pre_hook(lambda _, inputs: images.append(inputs[0][:, 0].int().tolist()))
        before = trunk.weight.detach().clone()
        trainer = MetricLossOnly(
            models={"trunk": trunk},
            optimizers={"trunk_optimizer": torch.optim.Adam(trunk.parameters())},
            batch_size=5,  # unused, for the sampler makes the batches
            loss_funcs={"metric_loss": loss_fn},
            dataset=Points(labels),
            sampler=sampler,
            dataloader_num_workers=workers,
            data_device=torch.device("cpu"),
        )
        trainer.train(num_epochs=2)
        expected = [written_out(labels, supers, 4, 16, 2, 1, epoch) for epoch in range(2)]
        assert trainer.iterations_per_epoch == 12
        assert images == expected[0] + expected[1]
        assert loss_fn.labels == [[labels[i] for i in batch] for batch in images]
        for seen in loss_fn.labels:
            assert all(count % 4 == 0 for count in collections.Counter(seen).values())
        assert not torch.equal(trunk.weight, before)


class TestImagesAlone:
    def test_classes_of_one_image_are_counted(self, caplog):
        SuperLabelBatchSampler([0, 0, 1, 2, 3, 3], batch_size=4)
        assert [record.getMessage() for record in caplog.records] == [
            "2 of 4 classes have a single image: it never has another of its class in a batch"
        ]

    def test_if_all_are_alone_it_is_said_what_can_learn_from_them(self, caplog):
        assert len(SuperLabelBatchSampler([3, 1, 2, 0], [0, 0, 1, 1], batch_size=8)) == 10
        assert [record.getMessage() for record in caplog.records] == [
            "each of 4 classes has a single image: a loss without proxies learns nothing"
        ]

    def test_without_any_nothing_is_said(self, caplog):
        with caplog.at_level(logging.INFO):
            SuperLabelBatchSampler(*UNEVEN, batch_size=16)
        assert not caplog.records

    @pytest.mark.parametrize("seed", range(4))
    def test_pairs_of_super_classes_without_two_images_of_a_class_are_counted(self, caplog, seed):
        """As many as the batches say: the class 9 has an image in each of the super classes 1 and 2."""
        supers = [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
        labels = [5, 5, 6, 9, 1, 9, 2, 3, 4, 7]
        sampler = SuperLabelBatchSampler(
            labels, supers, images_per_class=2, batch_size=16, batches_per_pair=1, seed=seed
        )
        idle = sum(len({labels[i] for i in batch}) == len(set(batch)) for batch in sampler)
        assert idle == 5  # 1 3, 1 4, 2 3, 2 4, 3 4
        assert f"{idle} of 10 pairs of super classes have no class with two images" in caplog.text


def test_numbers_of_numpy_are_numbers():
    expected = SuperLabelBatchSampler(*UNEVEN, batch_size=16, batches_per_pair=3, seed=7)
    given = SuperLabelBatchSampler(
        *UNEVEN, images_per_class=np.int8(4), batch_size=np.uint8(16), batches_per_pair=np.int64(3), seed=np.uint64(7)
    )
    alone = SuperLabelBatchSampler(UNEVEN[0], batch_size=np.uint8(16))
    assert len(alone) == len(SuperLabelBatchSampler(UNEVEN[0], batch_size=16))
    for sampler in (expected, given):
        sampler.set_epoch(np.uint8(2), np.int16(1))
    assert list(given) == list(expected)
    assert given._next == (3, 0)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"labels": []}, ValueError, "a super label for each of N ≥ 1 labels, got 4 for 0"),
            ({"labels": [0, 1], "super_labels": [0]}, ValueError, "got 1 for 2"),
            ({"labels": [[0, 1]]}, ValueError, r"labels: expected the shape \(N,\), got \(1, 2\)"),
            ({"labels": [0.0, 1.0]}, TypeError, "labels: expected integers, got float64"),
            ({"labels": np.array([2**24, 2**24 + 1], np.float32)}, TypeError, "labels: expected integers, got float32"),
            ({"labels": [0, float("nan"), 1, 1]}, TypeError, "labels: expected integers, got float64"),
            ({"labels": [True, False, True, False]}, TypeError, "labels: expected integers, got bool"),
            ({"labels": [2**64, 0, 1, 1]}, TypeError, "labels: expected integers, got object"),
            ({"labels": ["a", "b"]}, TypeError, "labels: expected integers, got <U1"),
            ({"super_labels": torch.rand(4)}, TypeError, "super_labels: expected integers, got float32"),
            ({"images_per_class": 1}, ValueError, "images_per_class: expected an integer of at least 2, got 1"),
            ({"images_per_class": 4.0}, ValueError, "images_per_class: expected an integer of at least 2, got 4.0"),
            ({"batch_size": 0}, ValueError, "batch_size: expected an integer of at least 1, got 0"),
            ({"batch_size": 12}, ValueError,
             r"batch_size: expected a multiple of 8 \(2 super class\(es\) in a batch × 1 process\(es\) × images_per_"),
            ({"batch_size": 8, "num_replicas": 2, "rank": 0}, ValueError, "multiple of 16"),
            ({"super_labels": None, "batch_size": 6}, ValueError, "multiple of 4"),
            ({"batches_per_pair": 0}, ValueError, "batches_per_pair: expected an integer of at least 1, got 0"),
            ({"seed": -1}, ValueError, "seed: expected an integer of at least 0, got -1"),
            ({"num_replicas": 2}, ValueError, "expected num_replicas and rank together, got 2 and None"),
            ({"num_replicas": 2, "rank": 2}, ValueError, "rank: expected less than the 2 processes, got 2"),
            ({"num_replicas": 2, "rank": -1}, ValueError, "rank: expected an integer of at least 0, got -1"),
        ],
    )  # fmt: skip
    def test_is_refused(self, arguments, error, message):
        good = {"labels": [0, 0, 1, 1], "super_labels": [0, 0, 1, 1], "batch_size": 8}
        SuperLabelBatchSampler(**good)
        with pytest.raises(error, match=message):
            SuperLabelBatchSampler(**good | arguments)

    @pytest.mark.parametrize(
        ("epoch", "message"),
        [
            ((-1,), "epoch: expected an integer of at least 0, got -1"),
            ((0, 61), "start_batch: expected at most the 60 batches of an epoch, got 61"),
            ((0, -1), "start_batch: expected an integer of at least 0, got -1"),
        ],
    )
    def test_epochs_and_starts_out_of_range_are_refused(self, epoch, message):
        sampler = SuperLabelBatchSampler(*UNEVEN, batch_size=16)
        with pytest.raises(ValueError, match=message):
            sampler.set_epoch(*epoch)
