"""The score memory by itself, and as one big batch over two processes; inside PML's losses see ``test_pml.py``."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
import torch.multiprocessing

from rambo_plugins.core import ScoreMemory, average_precision_loss

WORLD = 2


def batch(step, rows=3):
    """Scores (rows, 2) and labels (rows,) that tell their step."""
    return torch.full((rows, 2), float(step), requires_grad=True), torch.full((rows,), step)


def steps_in(memory):
    contents = memory.contents()
    return None if contents is None else contents[1].tolist()


def test_it_is_a_ring_of_the_last_batches_oldest_first():
    memory = ScoreMemory(batches=2)
    seen = []
    for step, rows in enumerate([3, 1, 2, 4]):
        memory.push(*batch(step, rows))
        seen.append(steps_in(memory))
    assert seen == [[0] * 3, [0] * 3 + [1], [1, 2, 2], [2, 2, 3, 3, 3, 3]]
    assert len(memory) == 6
    memory.reset()
    assert memory.contents() is None
    assert len(memory) == 0


def test_it_is_not_used_before_the_warm_up_ends_and_full_then():
    memory = ScoreMemory(batches=2, warmup=3)
    seen = []
    for step in range(4):
        memory.push(*batch(step, 1))
        seen.append(steps_in(memory))
    assert seen == [None, None, None, [2, 3]]


def test_what_it_keeps_is_a_copy_without_a_graph():
    memory = ScoreMemory(batches=1)
    scores, labels = batch(1)
    memory.push(scores, labels)
    with torch.no_grad():
        scores += 5
    kept, _ = memory.contents()
    assert not kept.requires_grad
    assert kept.eq(1).all()


def test_extend_is_the_batch_and_then_what_was_kept():
    memory = ScoreMemory(batches=2)
    seen = []
    for step in range(4):
        scores, labels = memory.extend(*batch(step, 2))
        assert scores[:, 0].tolist() == labels.tolist()
        seen.append(labels.tolist())
    assert seen == [[0, 0], [1, 1, 0, 0], [2, 2, 0, 0, 1, 1], [3, 3, 1, 1, 2, 2]]


def test_the_gradient_reaches_the_current_batch_only():
    memory = ScoreMemory(batches=1)
    first, second = batch(0), batch(1)
    memory.extend(*first)
    memory.extend(*second)[0].sum().backward()
    assert first[0].grad is None
    assert second[0].grad.eq(1).all()


def test_a_forward_pass_without_a_gradient_neither_uses_nor_fills_it():
    memory = ScoreMemory(batches=2)
    memory.extend(*batch(0))
    scores, labels = batch(1)
    with torch.no_grad():
        assert memory.extend(scores, labels)[1].tolist() == [1, 1, 1]
    assert memory.extend(scores.detach(), labels)[1].tolist() == [1, 1, 1]
    memory.eval()
    assert memory.extend(scores, labels)[1].tolist() == [1, 1, 1]
    assert steps_in(memory) == [0, 0, 0]


def test_half_precision_batches_meet_older_ones_in_their_own_dtype():
    memory = ScoreMemory(batches=2)
    memory.extend(*batch(0))
    scores, labels = batch(1)
    assert memory.extend(scores.bfloat16(), labels)[0].dtype == torch.bfloat16


LIKE = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("like", [None, LIKE])
@pytest.mark.parametrize("pushes", range(7))
def test_a_checkpoint_continues_where_it_was(like, pushes):
    memory, resumed = (ScoreMemory(batches=3, warmup=2, like=like) for _ in range(2))
    for step in range(pushes):
        memory.push(*batch(step, rows=step % 4))  # also a batch of no rows
    resumed.push(*batch(99))
    resumed.load_state_dict(memory.state_dict())
    for step in range(pushes, pushes + 4):
        assert steps_in(resumed) == steps_in(memory)
        memory.push(*batch(step, 2))
        resumed.push(*batch(step, 2))
    assert steps_in(resumed) == [step for step in range(pushes + 1, pushes + 4) for _ in range(2)]


def test_with_like_a_checkpoint_has_fixed_shapes_and_loads_in_place():
    memory, other = (ScoreMemory(batches=3, like=LIKE) for _ in range(2))
    shapes = {name: (value.shape, value.dtype) for name, value in memory.state_dict().items()}
    for step in range(5):
        memory.push(*batch(step, rows=1 + step % 4))
        assert {name: (value.shape, value.dtype) for name, value in memory.state_dict().items()} == shapes
    in_place = other.state_dict()
    for name, value in memory.state_dict().items():
        in_place[name].copy_(value)
    other.load_state_dict(in_place)
    assert steps_in(other) == steps_in(memory)


def test_a_smaller_memory_takes_the_latest_batches_of_a_checkpoint():
    memory, smaller = ScoreMemory(batches=3), ScoreMemory(batches=2)
    for step in range(3):
        memory.push(*batch(step, 1))
    smaller.load_state_dict(memory.state_dict())
    assert steps_in(smaller) == [1, 2]


@pytest.mark.parametrize("later", [0, 1, 3])
def test_a_larger_memory_takes_a_checkpoint_and_fills_up_through_any_number_of_further_ones(later):
    memory = ScoreMemory(batches=3)
    for step in range(6):
        memory.push(*batch(step, 1))
    larger = ScoreMemory(batches=5)
    larger.load_state_dict(memory.state_dict())
    for step in range(6, 6 + later):
        larger.push(*batch(step, 1))
        again = ScoreMemory(batches=5)
        again.load_state_dict(larger.state_dict())
        larger = again
    larger.load_state_dict(copy.deepcopy(larger.state_dict()))
    larger.push(*batch(9, 1))
    assert steps_in(larger) == [*range(3, 6 + later), 9][-5:]


@pytest.mark.parametrize("like", [None, tuple(torch.zeros(2) for _ in range(12))])
def test_a_batch_of_twelve_tensors_comes_back_in_its_order(like):
    memory, resumed = (ScoreMemory(batches=2, like=like) for _ in range(2))
    memory.push(*(torch.full((2,), float(number)) for number in range(12)))
    resumed.load_state_dict(memory.state_dict())
    assert [int(tensor[0]) for tensor in resumed.contents()] == list(range(12))


def test_a_copy_has_what_was_kept_and_goes_its_own_way():
    memory = ScoreMemory(batches=2, warmup=1)
    for step in range(2):
        memory.push(*batch(step, 1))
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert steps_in(other) == [0, 1]
        other.push(*batch(5, 1))
        assert steps_in(other) == [1, 5]
    assert steps_in(memory) == [0, 1]


def test_a_checkpoint_that_came_to_another_device_follows_the_batches():
    memory, resumed = ScoreMemory(batches=3), ScoreMemory(batches=3)
    memory.push(*batch(0))
    resumed.load_state_dict(memory.state_dict())
    resumed.push(*(tensor.to("meta") for tensor in batch(1)))
    assert [(kept.device.type, len(kept)) for kept in resumed.contents()] == [("meta", 6), ("meta", 6)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"field1": torch.zeros(1)}, r"expected tensors of 3 items or more, got \[3, 1\]"),
        ({"field0": None, "field1": None}, r"expected tensors of 3 items or more, got \[\]"),
        ({"field0": None}, r"Unexpected key.*field1"),
        ({"field2": torch.zeros(3), "scores": torch.zeros(3)}, r"Unexpected key.*scores"),
        ({"pushes": None}, r"Missing key.*pushes"),
    ],
)
def test_a_checkpoint_that_is_not_of_a_memory_is_refused(change, message):
    memory = ScoreMemory(batches=2)
    memory.push(*batch(1))
    state = {name: value for name, value in {**memory.state_dict(), **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        ScoreMemory(batches=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("pushed", "message"),
    [
        ((torch.zeros(3, 5), torch.zeros(3)), r"expected items of shapes \[\(2,\), \(\)\], got \[\(5,\), \(\)\]"),
        ((torch.zeros(6, 2), torch.zeros(6)), "expected batches of at most 4 items, got 6"),
    ],
)
def test_with_like_a_checkpoint_of_other_shapes_is_refused_and_the_memory_left_as_it_was(pushed, message):
    memory, other = ScoreMemory(batches=2), ScoreMemory(batches=2, like=LIKE)
    memory.push(*pushed)
    other.push(*batch(1, rows=1))
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(memory.state_dict())
    assert steps_in(other) == [1]


def test_a_batch_that_was_joined_is_kept_only_when_it_is_pushed():
    memory = ScoreMemory(batches=2)
    memory.push(*batch(0, 1))
    for _ in range(2):
        (_, joined), pushed = memory.join(*batch(1, 2))
        assert joined.tolist() == [1, 1, 0]
    memory.push(*pushed)
    assert steps_in(memory) == [0, 1, 1]
    with torch.no_grad():
        assert memory.join(*batch(2))[1] is None


def test_other_shapes_are_refused_before_they_are_joined():
    memory = ScoreMemory(batches=2)
    memory.push(*batch(0))
    with pytest.raises(ValueError, match=r"shapes \[\(2,\), \(\)\], got \[\(5,\), \(\)\]: reset\(\) it first"):
        memory.join(torch.zeros(3, 5, requires_grad=True), torch.zeros(3))


def test_numbers_of_numpy_are_numbers():
    memory = ScoreMemory(np.int64(2), warmup=np.int32(1))
    assert (memory.batches, memory.warmup) == (2, 1)
    assert type(memory.batches) is int


def test_a_checkpoint_without_a_memory_is_reported():
    memory = ScoreMemory(batches=2)
    memory.push(*batch(0))
    with pytest.raises(RuntimeError, match="lengths"):
        memory.load_state_dict({})
    with pytest.raises(RuntimeError, match="lengths"):
        ScoreMemory(batches=0).load_state_dict(memory.state_dict())


@pytest.mark.parametrize(
    ("arguments", "tensors", "message"),
    [
        ({"batches": -1}, (), "memory must be an integer >= 0, got -1"),
        ({"batches": True}, (), "memory must be"),
        ({"batches": np.float32(2)}, (), "memory must be an integer >= 0"),
        ({"batches": 1, "warmup": 0.5}, (), "warm-up must be an integer >= 0, got 0.5"),
        ({"batches": 1, "like": (torch.zeros(2), torch.zeros(3))}, (), r"one length, got tensors of \[2, 3\]"),
        ({"batches": 1}, (torch.zeros(2), torch.zeros(3)), r"one length, got tensors of \[2, 3\]"),
        ({"batches": 1, "like": LIKE}, (torch.zeros(5, 2), torch.zeros(5)), "at most 4 items, got 5"),
        ({"batches": 1, "like": LIKE}, (torch.zeros(3, 3), torch.zeros(3)), r"\[\(2,\), \(\)\], got \[\(3,\), \(\)\]"),
    ],
)
def test_bad_input_is_named(arguments, tensors, message):
    with pytest.raises(ValueError, match=message):
        ScoreMemory(**arguments).push(*tensors)


def test_other_shapes_than_those_kept_are_refused():
    memory = ScoreMemory(batches=2)
    memory.push(*batch(0))
    with pytest.raises(ValueError, match="reset"):
        memory.push(torch.zeros(3, 5), torch.zeros(3))


def training(own, parallel=lambda model: model, gather=False):
    """Gradients of four steps of a classifier on batches that grow, with a memory of two; ``own`` picks the rows."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 5, generator=generator, dtype=torch.float64))
    wrapped, memory, grads = parallel(model), ScoreMemory(batches=2, gather=gather), []
    for step in range(4):
        inputs = torch.randn(12 + step, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(4, (12 + step,), generator=generator)
        scores, targets = memory.extend(wrapped(inputs[own]), targets[own])
        model.zero_grad()
        relevance = targets[:, None] == torch.arange(3)
        average_precision_loss(scores.T, relevance.T, lambda_val=50.0, margin=0.1).backward()
        grads.append(model.weight.grad.clone())
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
    return grads


OWN = [slice(0, 5), slice(5, None)]  # unequal, and the second one grows


def worker(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.save(training(OWN[rank], torch.nn.parallel.DistributedDataParallel, gather=True), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's destructor can wait for a thread that waits for Python's lock, and never end


def test_gathered_over_two_processes_it_has_the_gradient_of_one_big_batch(tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=WORLD)
    expected = training(slice(None))
    assert all(grad.abs().max() > 0 for grad in expected)
    for rank in range(WORLD):
        for grad, whole in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            torch.testing.assert_close(grad, whole)


def test_a_model_with_a_memory_goes_through_the_state_dicts_of_distributed_checkpoints():
    """FSDP and DeepSpeed's users save by these functions, which look each entry up in its module."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    def model():
        return torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), "memory": ScoreMemory(2)})

    filled, fresh = model(), model()
    batches = [torch.arange(3.0) + 10 * step for step in range(3)]
    for step, batch in enumerate(batches):
        filled["memory"].push(batch, torch.full((3,), step))
    saved = get_model_state_dict(filled)
    assert set(saved) == set(filled.state_dict())
    set_model_state_dict(fresh, saved)
    found = fresh["memory"].contents()
    assert found[0].tolist() == [*batches[1].tolist(), *batches[2].tolist()]
    assert found[1].tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(AttributeError, match="no attribute 'field2'"):
        filled["memory"].field2  # noqa: B018
