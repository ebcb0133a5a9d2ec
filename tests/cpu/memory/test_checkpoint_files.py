"""Checkpoints are distrusted: whatever lies in the directory, the answer is tensors or one line."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from checkpoints import Model, layered, raw_file, write_file, write_sharded
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2cserve.memory.checkpoint import CheckpointError, find_files, open_checkpoint, read_header
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, TensorPlan


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header_of(tmp_path: Path, header: object, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return raw_file(tmp_path / "model.safetensors", text, data)


# ---- headers ----------------------------------------------------------------------------------


def test_a_header_is_read_with_offsets_from_the_start_of_the_file(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": tensor(0, 24, [2, 3]),
        "b": tensor(24, 24, [0]),
    }
    path = header_of(tmp_path, header)
    found = read_header(path)
    base = 8 + len(json.dumps(header))
    assert set(found) == {"a", "b"}
    assert (found["a"].offset, found["a"].bytes, found["a"].shape) == (base, 24, (2, 3))
    assert found["a"].dtype == "float32"


BAD_HEADERS: dict[str, object] = {
    "not json": b"{",
    "not an object": [1],
    "not utf-8": b'{"\xff": 1}',
    "endless nesting": b"[" * 100_000,
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
    "tensor is not an object": {"a": 3},
    "shape of strings": {"a": tensor(0, 4, ["1"])},
    "shape of floats": {"a": tensor(0, 4, [1.0])},
    "shape of booleans": {"a": tensor(0, 4, [True])},
    "negative shape": {"a": tensor(0, 4, [-1, -1])},
    "one offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    "offsets in the wrong order": {"a": tensor(8, 4, [1])},
    "negative offset": {"a": tensor(-4, 0, [1])},
    "unknown dtype": {"a": tensor(0, 4, [1], "F33")},
    "dtype is a list": {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
    "more bytes than the shape has": {"a": tensor(0, 8, [1])},
    "fewer bytes than the shape has": {"a": tensor(0, 4, [2])},
    "a size beyond 64 bits": {"a": tensor(0, 4, [1 << 63, 1 << 63])},
    "beyond the end": {"a": tensor(0, 68, [17])},
    "overlap": {"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])},
    "same bytes": {"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])},
    "a name twice": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "a field twice": b'{"a":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_bad_header_is_refused_in_one_line(tmp_path: Path, header: object) -> None:
    path = header_of(tmp_path, header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"\x01\x02", struct.pack("<Q", 9) + b"{}"])
def test_a_file_too_short_for_its_header(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"too short|header of"):
        read_header(tmp_path / "f")


def test_a_header_length_beyond_reason_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 42)  # sparse: the length is inside the file
    with pytest.raises(CheckpointError, match="header of 1099511627776 bytes"):
        read_header(path)


def test_a_truncated_file_says_where_it_ends(tmp_path: Path) -> None:
    model = layered(3, (16, 4))
    path = write_file(tmp_path / "model.safetensors", model.stored)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=f"truncated: .*layers.2.* the file has {size - 1}"):
        open_checkpoint(tmp_path, model.plan)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F99", 3, None]) | JSON,
        "shape": st.lists(st.integers(-1, 5) | JSON, max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 70) | JSON, max_size=3) | JSON,
    },
)


def read_or_refuse(header: bytes, data: bytes) -> None:
    """Either refused, or every tensor found lies inside the file with the bytes of its shape."""
    with TemporaryDirectory() as directory:
        path = raw_file(Path(directory) / "f", header, data)
        size = path.stat().st_size
        try:
            found = read_header(path)
        except CheckpointError:
            return
        ends = 8 + len(header)
        for source in sorted(found.values(), key=lambda s: (s.offset, s.bytes)):
            assert source.offset + source.bytes <= size
            if source.bytes:
                assert source.offset >= ends, "two tensors share bytes"
                ends = source.offset + source.bytes


@settings(max_examples=examples(120), deadline=None)
@given(header=st.dictionaries(st.text(max_size=4), ALMOST | JSON, max_size=4))
@example(header={"__metadata__": {"a": 1}})
def test_structured_noise_never_escapes_as_another_error(header: dict[str, Any]) -> None:
    read_or_refuse(json.dumps(header).encode(), bytes(64))


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_escape_as_another_error(data: st.DataObject) -> None:
    good = json.dumps({"a": tensor(0, 24, [2, 3]), "b": tensor(24, 32, [2])}).encode()
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)) | st.just(len(good)))
    read_or_refuse(bytes(damaged[:cut]), bytes(data.draw(st.integers(0, 40))))


# ---- directories ------------------------------------------------------------------------------


def test_which_files_are_the_checkpoint(tmp_path: Path) -> None:
    model = layered(4, (2, 2))
    names = list(model.stored)
    write_file(tmp_path / "model.safetensors", model.stored)
    write_file(tmp_path / "consolidated.safetensors", model.stored)
    assert [p.name for p in find_files(tmp_path)] == ["model.safetensors"], "extra files are left"
    shards = {
        f"model-{i}.safetensors": {name: model.stored[name] for name in names[i::2]}
        for i in range(2)
    }
    write_sharded(tmp_path, shards)
    assert [p.name for p in find_files(tmp_path)] == sorted(shards), "an index decides"
    assert set(open_checkpoint(tmp_path, model.plan)) == set(names)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = layered(2, (2, 2))
    items = list(model.stored.items())
    write_sharded(tmp_path, {f"model-{i}.safetensors": dict([items[i]]) for i in range(2)})
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: shard is missing \(2 are"):
        find_files(tmp_path)


INDEXES = ['{"weight_map": []}', '{"weight_map": {"a": 3}}', "{}", "[]", "x", '{"weight_map": 0}']


@pytest.mark.parametrize("text", [*INDEXES, '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_a_bad_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        find_files(tmp_path)


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        find_files(tmp_path)


def test_an_empty_directory_and_a_missing_one(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
            find_files(directory)


# ---- what the plan needs ------------------------------------------------------------------------


def needing(**shapes: tuple[int, ...]) -> LayoutPlan:
    return LayoutPlan(
        tuple(TensorPlan(name, shape, "float32") for name, shape in shapes.items()),
        tuple(GroupPlan(n, (Part(n, shape, n),)) for n, shape in shapes.items()),
        optional=(".inv_freq",),
    )


def stored(**shapes: tuple[int, ...]) -> Model:
    model = Model()
    for name, shape in shapes.items():
        model.stored |= {name: next(iter(layered(1, shape).stored.values()))}
    return model


def test_every_mismatch_is_named_with_what_was_expected(tmp_path: Path) -> None:
    model = stored(a=(2, 3), b=(4,), extra=(1,))
    write_file(tmp_path / "model.safetensors", model.stored)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, needing(a=(3, 2), b=(4,), c=(5, 1)))
    message = str(caught.value)
    assert "a has shape [2, 3], expected [3, 2]" in message
    assert "c is missing (expected shape [5, 1])" in message
    assert "extra is not part of this architecture" in message
    assert len(message.splitlines()) == 1


def test_many_mismatches_stay_readable(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", stored(a=(1,)).stored)
    with pytest.raises(CheckpointError, match="and 95 more"):
        open_checkpoint(tmp_path, needing(a=(1,), **{f"w{i}": (1,) for i in range(100)}))


def test_a_dtype_that_weights_can_not_have(tmp_path: Path) -> None:
    header_of(tmp_path, {"a": tensor(0, 4, [4], "I8")})
    with pytest.raises(CheckpointError, match="a has dtype I8, expected F32, F16 or BF16"):
        open_checkpoint(tmp_path, needing(a=(4,)))


def test_known_leftovers_are_let_be(tmp_path: Path) -> None:
    model = stored(a=(2,))
    model.stored["layers.0.inv_freq"] = model.stored["a"]
    write_file(tmp_path / "model.safetensors", model.stored)
    assert set(open_checkpoint(tmp_path, needing(a=(2,)))) == {"a"}


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    model = stored(a=(2,), b=(2,))
    write_sharded(tmp_path, {"x.safetensors": model.stored, "y.safetensors": model.stored})
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"y\.safetensors: tensor a is also in x"):
        open_checkpoint(tmp_path, needing(a=(2,), b=(2,)))
