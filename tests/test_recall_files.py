"""The readers of the evaluation: what was written comes back equal, or the file is refused; nothing is guessed."""

import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

pytest.importorskip("faiss")

from rambo_plugins.evaluation.files import read_embeddings, read_keys, read_paths

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

quick = settings(max_examples=50, deadline=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def refused(read, path, *words, **options):
    """The error's one line, which names the file and has these words."""
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    said = str(caught.value)
    assert said.startswith(str(path)), said
    assert "\n" not in said
    for word in words:
        assert word in said, said
    return said


# --- lines of text ----------------------------------------------------------------------------------------------------

CHARACTERS = st.characters(exclude_characters="\n", exclude_categories=["Cs"])
LABELS = st.lists(
    st.one_of(
        st.text(CHARACTERS, max_size=4), st.sampled_from(["1", "01", "+1", "1_0", "10", "١", "1.0", "nan", "e\u0301"])
    ),
    min_size=1,
    max_size=6,
)


@quick
@given(labels=LABELS, end=st.sampled_from(["\n", "\r\n"]), last=st.booleans(), mark=st.booleans())
def test_lines_are_labels_letter_by_letter_or_are_refused(folder, labels, end, last, mark):
    assume(not labels[0].startswith("\ufeff") and (last or labels[-1]))
    assume(end == "\r\n" or not any(label.endswith("\r") for label in labels))  # which would be such an end
    path = folder / "labels.txt"
    text = ("\ufeff" if mark else "") + end.join(labels) + (end if last else "")
    path.write_bytes(text.encode())
    wrong = [x == "" or x[0].isspace() or x[-1].isspace() or any(c in x for c in "\0\r\ufeff") for x in labels]
    if any(wrong):
        refused(read_keys, path, f", line {wrong.index(True) + 1}: ")
    else:
        assert read_keys(path).tolist() == labels


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (b"cat\n\ndog\n", 2, "got an empty line"),
        (b"cat\ndog\n\n", 3, "got an empty line"),
        (b"cat\n \t\ndog\n", 2, "got an empty line"),
        (b"\n", 1, "got an empty line"),
        (b"cat\n dog\n", 2, "no blank before or after a label or id, got ' dog'"),
        (b"cat \n", 1, "no blank before or after a label or id, got 'cat '"),
        (b"cat\nd\xf6g\n", 2, r"expected UTF-8, got the bytes b'd\xf6g'"),
        ("cat\n".encode("utf-16"), 1, "with a NUL"),
        (b"cat\0\n", 1, "with a NUL"),
        ("cat\n\ufeffdog\n".encode(), 2, "with a byte order mark"),
        (b"cat\rdog\r", 1, r"with a \r that ends no line"),
    ],
)
def test_a_line_that_is_no_label_is_named(tmp_path, text, line, words):
    (tmp_path / "a.txt").write_bytes(text)
    refused(read_keys, tmp_path / "a.txt", f", line {line}: ", words)


def test_names_of_files_come_back_in_their_bytes(tmp_path):
    names = [b"a.png", b"with blanks .png", b"\xff\xfe.png", "héron.png".encode()]
    (tmp_path / "paths.txt").write_bytes(b"\r\n".join(names))
    assert [bytes(path) for path in read_paths(tmp_path / "paths.txt")] == names
    for text, words in ((b"a.png\n\n", "line 2: "), (b"a\0.png\n", "line 1: ")):
        (tmp_path / "paths.txt").write_bytes(text)
        refused(read_paths, tmp_path / "paths.txt", words)


# --- arrays -----------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    nps.integer_dtypes(endianness="?"),
    nps.unsigned_integer_dtypes(endianness="?"),
    nps.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
)
OTHERS = st.one_of(
    nps.boolean_dtypes(),
    nps.complex_number_dtypes(),
    nps.datetime64_dtypes(),
    nps.byte_string_dtypes(max_len=3),
    nps.array_dtypes(max_size=2),
)


def save(path, array):
    np.save(path, array) if path.suffix == ".npy" else np.savez(path, array)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@quick
@given(data=st.data())
def test_embeddings_of_numpy_come_back_or_are_refused(folder, suffix, data):
    dtype = data.draw(st.one_of(NUMBERS, OTHERS))
    array = data.draw(nps.arrays(dtype, nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
    array = np.asfortranarray(array) if data.draw(st.booleans()) else array
    path = save(folder / f"a{suffix}", array)
    if array.ndim == 2 and array.size and array.dtype.kind in "iuf":
        found = read_embeddings(path)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    else:
        refused(read_embeddings, path)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@quick
@given(data=st.data())
def test_keys_of_numpy_come_back_or_are_refused(folder, suffix, data):
    dtype = data.draw(st.one_of(NUMBERS, OTHERS, nps.unicode_string_dtypes(max_len=4)))
    array = data.draw(nps.arrays(dtype, nps.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4)))
    path = save(folder / f"k{suffix}", array)
    one = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    if one and array.dtype.kind in "iuU":
        assert read_keys(path).tolist() == array.ravel().tolist()
    else:
        refused(read_keys, path)


def test_floats_are_no_labels_since_large_ones_are_one(tmp_path):
    labels = np.array([16_777_216, 16_777_217])
    assert labels.astype(np.float32)[0] == labels.astype(np.float32)[1]
    for array in (labels.astype(np.float32), labels.astype(float), np.array([1.0, np.nan])):
        refused(read_keys, save(tmp_path / "a.npy", array), "expected integers or strings, got dtype float")
        refused(read_keys, table(tmp_path / "a.parquet", {"label": array}), "expected integers or strings, got")
    assert read_keys(save(tmp_path / "a.npy", labels)).tolist() == labels.tolist()


def test_what_is_no_single_array_of_numbers_is_refused(tmp_path):
    rows = np.ones((3, 2), np.float32)
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        np.save(file, rows)
        np.save(file, rows)
    refused(read_embeddings, path, "expected one array, got one of shape (3, 2) and 152 more bytes")
    np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True)
    refused(read_embeddings, path, "not a readable .npy file")
    np.savez(tmp_path / "a.npz", rows)
    (tmp_path / "a.npz").rename(path)  # by the suffix of another kind
    refused(read_embeddings, path, "not a readable .npy file")
    np.save(path, rows)
    archive = path.rename(tmp_path / "a.npz")
    refused(read_embeddings, archive, "not an archive of arrays")
    np.savez(archive)
    refused(read_embeddings, archive, "expected one array, got 0")
    np.savez(archive, a=rows, b=rows)
    refused(read_embeddings, archive, "expected one array, got 2: a, b")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("notes.txt", "no array")
    refused(read_embeddings, archive, "expected one array, got 1: notes.txt")
    np.savez(archive, np.array([{}], dtype=object), allow_pickle=True)
    refused(read_embeddings, archive, "not a readable .npz file")
    np.save(path, rows.view("V2"))  # as ml_dtypes' bfloat16 arrives
    refused(read_embeddings, path, "expected real numbers, got dtype |V2")
    for suffix in (".pt", ".csv", ".pkl", ""):
        refused(read_embeddings, tmp_path / f"a{suffix}", "expected a file of the kind .npy, .npz")
    with pytest.raises(FileNotFoundError, match=r"missing\.parquet"):
        read_embeddings(tmp_path / "missing.parquet")


@quick
@given(data=st.data())
def test_rows_with_their_length_come_back(folder, data):
    suffix, kind = data.draw(st.sampled_from([(".fvecs", np.float32), (".bvecs", np.uint8), (".ivecs", np.int32)]))
    rows = data.draw(nps.arrays(kind, nps.array_shapes(min_dims=2, max_dims=2, max_side=5)))
    path = folder / f"a{suffix}"
    path.write_bytes(b"".join(len(row).to_bytes(4, "little") + row.tobytes() for row in rows))
    np.testing.assert_array_equal(read_embeddings(path), rows)
    cut = data.draw(st.integers(1, path.stat().st_size - 1))
    path.write_bytes(path.read_bytes()[:cut])
    if cut % (len(rows[0].tobytes()) + 4):
        refused(read_embeddings, path)


def contents(kind):
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    file = io.BytesIO()
    if kind == ".npy":
        np.save(file, rows)
    elif kind == ".npz":
        np.savez_compressed(file, rows)
    elif kind == ".parquet":
        parquet.write_table(pyarrow.table({f"f{i}": rows[:, i] for i in range(4)}), file)
    else:
        file.write(b"".join(np.int32(4).tobytes() + row.tobytes() for row in rows))
    return file.getvalue()


@pytest.mark.parametrize("kind", [".npy", ".npz", ".parquet"])
def test_a_file_that_was_cut_anywhere_is_refused(tmp_path, kind):
    whole = contents(kind)
    assert read_embeddings(write(tmp_path / f"a{kind}", whole)).shape == (6, 4)
    for length in range(0, len(whole), 1 + len(whole) // 200):
        refused(read_embeddings, write(tmp_path / f"a{kind}", whole[:length]))


def write(path, text):
    path.write_bytes(text)
    return path


@pytest.mark.parametrize("kind", [".npy", ".npz", ".fvecs"])
@quick
@given(places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_file_ends_in_a_line_or_in_rows(folder, kind, places):
    text = bytearray(contents(kind))
    for place, byte in places:
        text[place % len(text)] = byte
    path = write(folder / f"d{kind}", bytes(text))
    said = ""
    try:
        found = read_embeddings(path)
    except ValueError as error:
        said = str(error)
    assert said.startswith(str(path)) if said else found.ndim == 2


# --- tables -----------------------------------------------------------------------------------------------------------


def table(path, columns, pandas=None):
    made = pyarrow.table(columns)
    if pandas is not None:
        made = made.replace_schema_metadata({"pandas": json.dumps({"index_columns": pandas})})
    parquet.write_table(made, path, row_group_size=2)
    return path


FLOATS = {16: pyarrow.float16(), 32: pyarrow.float32(), 64: pyarrow.float64()}


@quick
@given(data=st.data())
def test_vectors_of_a_table_come_back(folder, data):
    size = data.draw(st.sampled_from([16, 32, 64]))
    rows = data.draw(nps.arrays(f"f{size // 8}", nps.array_shapes(min_dims=2, max_dims=2, max_side=12)))
    dim, form = rows.shape[1], data.draw(st.sampled_from(["numbered", "numbers", "list", "large", "fixed"]))
    kinds = {"list": pyarrow.list_, "large": pyarrow.large_list, "fixed": lambda kind: pyarrow.list_(kind, dim)}
    if form in kinds:
        columns = {"vector": pyarrow.array([list(row) for row in rows], kinds[form](FLOATS[size]))}
    else:
        columns = {f"{'f' * (form == 'numbered')}{i}": rows[:, i] for i in range(dim)}
    index = data.draw(st.sampled_from([None, "__index_level_0__", "id"]))
    if index is not None:
        columns[index] = np.arange(len(rows))
    found = read_embeddings(table(folder / "v.parquet", columns, ["id"] if index == "id" else None))
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows)


ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
NUMBERED = {f"f{i}": ROWS[:, i] for i in range(4)}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({**NUMBERED, "label": [1, 2, 3]}, "nothing beside them, got 'f0', 'f1', 'f2', 'f3', 'label'; name those"),
        ({"label": [1, 2, 3], **NUMBERED}, "got 'label', 'f0'"),
        ({"f1": ROWS[:, 1], "f0": ROWS[:, 0]}, "got 'f1', 'f0'"),
        ({"f0": ROWS[:, 0], "f2": ROWS[:, 2]}, "got 'f0', 'f2'"),
        ({"f00": ROWS[:, 0], "f01": ROWS[:, 2]}, "got 'f00', 'f01'"),
        ({"x": ROWS[:, 0], "y": ROWS[:, 1]}, "got 'x', 'y'"),
        ({"x": list(ROWS), "y": list(ROWS)}, "got 'x', 'y'"),
        ({"__index_level_0__": [1, 2, 3]}, "none beside the index"),
        ({"f0": [1.0, None, 3.0]}, "column 'f0': expected a value in each row, got null in row 1"),
        ({"f0": [True, False, True]}, "column 'f0': expected numbers, got bool"),
        ({"f0": ["1", "2", "3"]}, "column 'f0': expected numbers, got string"),
        ({"x": [[1.0, 2.0], [3.0], [4.0, 5.0]]}, "expected lists of one length, got 2 values in row 0 and 1 in row 1"),
        ({"x": [[1.0, 2.0], [3.0, 4.0], [5.0]]}, "expected lists of one length, got 2 values in row 0 and 1 in row 2"),
        ({"x": [[1.0, 2.0], [3.0, 4.0], [None, 5.0]]}, "column 'x': expected numbers, got null in row 2"),
        ({"x": [[1.0, 2.0], [3.0, 4.0], None]}, "column 'x': expected a value in each row, got null in row 2"),
        ({"x": [[[1.0]], [[2.0]], [[3.0]]]}, "column 'x': expected lists of numbers, got list<element: list"),
        ({"x": [["1"], ["2"], ["3"]]}, "column 'x': expected lists of numbers, got list<element: string"),
        ({"x": [{"a": 1.0}] * 3}, "got 'x'"),
        ({"x": [[], [], []]}, ""),
        ({"f0": pyarrow.array([], pyarrow.float32())}, "at least one embedding"),
    ],
)  # fmt: skip
def test_columns_that_are_not_certainly_vectors_are_refused(tmp_path, columns, words):
    refused(read_embeddings, table(tmp_path / "a.parquet", columns), words)


def test_named_columns_are_the_vectors_in_this_order(tmp_path):
    path = table(tmp_path / "a.parquet", {"label": ["a", "b", "c"], **NUMBERED, "x.y": list(ROWS)})
    np.testing.assert_array_equal(read_embeddings(path, ["f3", "f0"]), ROWS[:, [3, 0]])
    np.testing.assert_array_equal(read_embeddings(path, ["x.y"]), ROWS)
    assert read_keys(path, "label").tolist() == ["a", "b", "c"]
    refused(read_embeddings, path, "expected one column 'f4', got 'label', 'f0'", columns=["f3", "f4"])
    refused(read_embeddings, path, "expected each column once, got 'f3' again", columns=["f3", "f3"])
    refused(read_embeddings, path, "column 'x.y': expected numbers, got list", columns=["f0", "x.y"])
    refused(read_keys, path, "expected one column, got 'label', 'f0'")
    refused(read_keys, path, "column 'f0': expected integers or strings, got float", column="f0")
    refused(read_embeddings, save(tmp_path / "a.npy", ROWS), "expected a .parquet", columns=["f0"])
    refused(read_keys, save(tmp_path / "a.npy", np.arange(3)), "expected a .parquet", column="label")
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["f0", "f0"])
    parquet.write_table(twice, path)
    refused(read_embeddings, path, "expected one column 'f0', got 'f0', 'f0'")


STRINGS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), min_size=1, max_size=5)


@quick
@given(labels=STRINGS, form=st.sampled_from(["string", "large", "categories"]), index=st.booleans())
def test_strings_of_a_table_come_back_or_are_refused(folder, labels, form, index):
    column = pyarrow.array(labels, pyarrow.large_string() if form == "large" else pyarrow.string())
    columns = {"label": column.dictionary_encode() if form == "categories" else column}
    path = table(folder / "k.parquet", {**columns, "__index_level_0__": range(len(labels))} if index else columns)
    if any("\0" in label for label in labels):
        refused(read_keys, path, "NUL")
    else:
        assert read_keys(path).tolist() == labels


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "uint64"])
def test_integers_of_a_table_come_back(tmp_path, dtype):
    keys = np.array([0, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    assert read_keys(table(tmp_path / "a.parquet", {"id": keys})).tolist() == keys.tolist()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, None], "got null in row 1"),
        (pyarrow.array(["a", None]).dictionary_encode(), "got null in row 1"),
        ([True, False], "expected integers or strings, got bool"),
        ([b"a", b"b"], "expected integers or strings, got binary"),
        ([[1], [2]], "expected integers or strings, got list"),
    ],
)
def test_a_column_that_is_no_key_is_refused(tmp_path, values, words):
    refused(read_keys, table(tmp_path / "a.parquet", {"id": values}), "column 'id': ", words)
