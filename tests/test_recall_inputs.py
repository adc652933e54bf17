"""Labels, ids and numbers of an evaluation: what is the same, what differs, and what is neither and refused."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("faiss")

from rambo_plugins.evaluation import approximate_recall_at_k, recall_at_k
from rambo_plugins.evaluation.inputs import as_keys, joint_codes

INTEGERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.integers(0, 255).map(torch.tensor),
)
STRINGS = st.one_of(st.text(max_size=3), st.text(max_size=3).map(np.str_))
NEITHER = st.one_of(st.booleans(), st.floats(), st.none(), st.binary(max_size=2), st.floats().map(np.float32))


@example(["", b"\x80"], False)
@example([1, [2, 3]], False)
@settings(max_examples=200, deadline=None)
@given(
    values=st.one_of(
        st.lists(INTEGERS, min_size=1),
        st.lists(STRINGS, min_size=1),
        st.lists(INTEGERS | STRINGS | NEITHER, min_size=1),
    ),
    objects=st.booleans(),
)  # fmt: skip
def test_keys_are_all_integers_or_all_strings_or_refused(values, objects):
    plain = [value.item() if isinstance(value, torch.Tensor | np.generic) else value for value in values]
    kinds = {type(value) for value in plain}
    given_values = values
    if objects:
        given_values = np.empty(len(values), dtype=object)
        given_values[:] = values
    if kinds == {int} or (kinds == {str} and not any(value.endswith("\0") for value in plain)):
        assert as_keys(given_values, "labels").tolist() == plain
    else:
        with pytest.raises((TypeError, ValueError), match=r"^labels: expected "):
            as_keys(given_values, "labels")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, "1"], "expected integers or strings, all of one kind, got '1' at 1 after 1"),
        (["a", "b", 3], "all of one kind, got 3 at 2 after 'a'"),
        ([1, True], "all of one kind, got True at 1 after 1"),
        (np.array([5, None], dtype=object), "all of one kind, got None at 1 after 5"),
        (np.array([5, 5.0], dtype=object), "all of one kind, got 5.0 at 1 after 5"),
        ([1, np.nan], "got dtype float64"),
        (np.array([1.0, 2.0], np.float32), "got dtype float32"),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "got dtype torch.bfloat16"),
        ([True, False], "got dtype bool"),
        (torch.tensor([True, False]), "got dtype torch.bool"),
        (["a\0", "a"], r"expected no NUL at the end, which numpy drops, got 'a\\x00' at 0"),
        ([2**70, 1], "expected integers that fit int64, got 1180591620717411303424"),
        (np.array([2**63], np.uint64), "expected integers that fit int64, got 9223372036854775808"),
        ([b"a"], "got dtype |S1"),
        (np.array(["2020-01-01"], "M8[D]"), "got dtype datetime64"),
    ],
)
def test_the_first_that_is_no_key_is_named(values, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        as_keys(values, "labels")
    assert message.replace("\\\\", "\\") in str(caught.value)


@pytest.mark.parametrize("dtype", ["int8", "uint8", ">i4", "int64", "uint64"])
def test_integers_of_all_kinds_are_the_same_keys(dtype):
    keys = as_keys(np.array([3, 1, 2], dtype), "labels")
    assert keys.dtype == np.int64
    assert joint_codes(keys, as_keys([np.uint8(2), 1], "labels"), "labels")[1].tolist() == [1, 0]


def test_labels_of_two_kinds_say_how_to_make_them_one():
    with pytest.raises(TypeError, match=r"got integers and strings; the lines of a \.txt are strings, and so are int"):
        recall_at_k(np.eye(3), [0, 0, 1], np.eye(3), ["0", "0", "1"])


def test_numbers_of_numpy_are_numbers_and_booleans_are_not(tmp_path):
    rows = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    labels = np.arange(60) // 3
    exact = {"sample": 20, "seed": 3, "max_memory": 2**24}
    indexed = {"check": 20, "seed": 3, "training": 50, "max_memory": 2**24}
    for run, numbers, others in (
        (recall_at_k, exact, {"work": tmp_path / "parts"}),
        (approximate_recall_at_k, indexed, {"index": "IVF2,Flat", "folder": tmp_path / "index"}),
    ):
        expected = run(rows, labels, ks=(1, 5), **numbers, **others)
        of_numpy = {name: np.int64(value) for name, value in numbers.items()}
        found = run(rows, labels, ks=np.array([1, 5]), **of_numpy, **others)
        assert found.first_rank.tolist() == expected.first_rank.tolist()
        assert (found.recall, found.num_sampled) == (expected.recall, expected.num_sampled)
        rest = {name: value for name, value in others.items() if name == "index"}
        for name in numbers:
            for wrong in (True, np.True_, 2.5 if name != "max_memory" else "x", -1, "much"):
                with pytest.raises(ValueError, match=rf"^{name}: expected "):
                    run(rows, labels, ks=(1, 5), **{**numbers, name: wrong}, **others)
        with pytest.raises(ValueError, match=r"^ks: expected one or more positive integers"):
            run(rows, labels, ks=(True, 5), **others)
        with pytest.raises(ValueError, match=r"^ks: expected one or more positive integers"):
            run(rows, labels, ks=(1, 2**63), **others)
        assert (
            run(rows, labels, ks=(1, 5), **{**numbers, "max_memory": "9999999999T"}, **rest).recall == expected.recall
        )
