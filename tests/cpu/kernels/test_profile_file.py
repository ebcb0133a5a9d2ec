"""A profile survives its file whole; one that is not for this machine or not one is told so."""

import datetime
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.profile import (
    DTYPES,
    HOMES,
    SCHEMA,
    HbmRate,
    LinkRates,
    MachineFacts,
    MatmulRate,
    Point,
    Profile,
    ProfileMalformed,
    ProfileMismatch,
    ProfileMissing,
    ReadRate,
    decode_profile,
    encode_profile,
    load_profile,
    profile_path,
    save_profile,
)
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles

POINT = Point("direct", Tiles(bx=16), 8, 4096, 4096, "bfloat16", "peer", 132, 1e-4)

counts = st.integers(1, 1 << 40)
rates = st.floats(1e-9, 1e18)
texts = st.text(min_size=1, max_size=20)


@st.composite
def link_rates(draw: st.DrawFn) -> LinkRates:
    keys = draw(st.sets(st.tuples(counts, st.integers(1, 7)), max_size=5)) | {(4, 1)}
    reads = tuple(ReadRate(ctas, slices, draw(rates)) for ctas, slices in keys)
    return LinkRates(draw(rates), draw(rates), draw(rates), reads)


@st.composite
def points(draw: st.DrawFn) -> Point:
    dataflow = draw(st.sampled_from(list(DATAFLOWS)))
    experts = draw(counts) if dataflow == "grouped" else 0
    tiles = Tiles(
        bx=draw(st.integers(1, 32)) * 8,
        cluster=draw(st.sampled_from([1, 2, 4, 8])),
        kp=draw(st.integers(1, 64)) * 64,
        panel_rows=draw(st.integers(1, 64)) * 128,
        alpha=draw(st.floats(0, 1)),
        partial_bytes=draw(st.sampled_from([2, 4])),
    )
    return Point(
        dataflow, tiles, draw(counts), draw(counts), draw(counts), draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(HOMES)), draw(counts), draw(rates), draw(st.integers(0, 6)), experts,
        draw(st.integers(1, experts)) if experts else 0,
    )  # fmt: skip


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    sms = st.sets(counts, min_size=1, max_size=4)
    rows = st.sets(st.tuples(counts, counts), min_size=1, max_size=4)
    moment = draw(st.datetimes(timezones=st.just(datetime.UTC)))
    unique = st.lists(points(), max_size=6, unique_by=lambda p: (p.dataflow, p.m, p.n))
    return Profile(
        machine=MachineFacts(draw(texts), draw(counts), draw(texts), draw(texts)),
        date=moment,
        commit=draw(st.text(max_size=40)),
        links={"host": draw(link_rates()), "peer": draw(link_rates())},
        hbm=tuple(HbmRate(count, draw(rates), draw(rates)) for count in draw(sms)),
        matmul_flops=tuple(MatmulRate(m, count, draw(rates)) for m, count in draw(rows)),
        points=tuple(draw(unique)),
    )


@settings(deadline=None)
@given(profiles())
def test_a_profile_survives_its_file(profile: Profile) -> None:
    data = encode_profile(profile)
    assert decode_profile(data) == profile
    assert json.loads(data)["version"] == SCHEMA


def test_saved_whole_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    profile = msgspec.structs.replace(assumed_h200(), points=(POINT,))
    assert save_profile(profile, path) == path
    assert load_profile(path, gpu="NVIDIA H200") == profile
    save_profile(assumed_h200(), path)
    assert load_profile(path).points == ()
    assert [one.name for one in path.parent.iterdir()] == ["profile.json"]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path = save_profile(assumed_h200(), tmp_path / "profile.json")
    broken = msgspec.structs.replace(POINT, seconds=float("nan"))
    with pytest.raises(ProfileMalformed, match=r"points\[0\]\.seconds"):
        save_profile(msgspec.structs.replace(assumed_h200(), points=(broken,)), path)
    assert load_profile(path) == assumed_h200()


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "profile.json"
    save_profile(assumed_h200())
    assert load_profile() == assumed_h200()
    monkeypatch.delenv("C2CSERVE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".cache" / "c2cserve" / "profile.json"


def test_missing_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ProfileMissing, match=r"none\.json: .*run `c2cserve profile`"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(ProfileMissing, match="cannot be read"):
        load_profile(tmp_path)


def test_another_gpu_is_refused(tmp_path: Path) -> None:
    path = save_profile(assumed_h200(), tmp_path / "profile.json")
    with pytest.raises(ProfileMismatch, match="NVIDIA H200, this is NVIDIA H100: run `c2cserve"):
        load_profile(path, gpu="NVIDIA H100")


@pytest.mark.parametrize("content", [{"version": SCHEMA + 1}, {"version": 0, "points": 3}])
def test_another_version_is_refused_before_it_is_read(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileMismatch, match=rf"of version {content['version']}, .*run `c2c"):
        load_profile(path)


def changed(*keys: str | int, to: Any) -> bytes:
    """A sound profile with one value replaced."""
    profile = msgspec.structs.replace(assumed_h200(), points=(POINT, grouped()))
    document = json.loads(encode_profile(profile))
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    return json.dumps(document).encode()


def grouped() -> Point:
    return msgspec.structs.replace(POINT, dataflow="grouped", experts=8, top_k=2)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"", "is not a profile"),
        (b"[]", "Expected `object`"),
        (b"{}", "version"),
        (b'{"version": 1, ', "is not a profile"),
        (b"\xff", "is not a profile"),
        (changed("version", to="one"), r"\$\.version"),
        (changed("machine", "sms", to=0), r"\$\.machine\.sms"),
        (changed("machine", "gpu", to=""), r"\$\.machine\.gpu"),
        (changed("date", to="yesterday"), r"\$\.date"),
        (changed("date", to="2026-01-01T00:00:00"), r"\$\.date"),
        (changed("hbm", to=[]), r"\$\.hbm"),
        (changed("hbm", 0, "read_bytes_per_s", to=-1.0), r"\$\.hbm\[0\]\.read_bytes_per_s"),
        (changed("links", "moon", to={}), "moon"),
        (changed("links", "host", "reads", 0, "slices", to=0), r"\[\.\.\.\]\.reads\[0\]\.slices"),
        (changed("links", "host", "reads", to=[]), "reads"),
        (
            changed("links", "host", "reads", to=[{"ctas": 4, "slices": 2, "bytes_per_s": 1.0}]),
            "one slice alone",
        ),
        (changed("links", to={}), r"points\[0\] is from a peer, which links lacks"),
        (changed("matmul_flops", 1, "m", to=8), r"matmul_flops has 2 entries for \(8, 132\)"),
        (changed("points", 0, "seconds", to=0), r"\$\.points\[0\]\.seconds"),
        (changed("points", 0, "seconds", to=1e999), "seconds|out of range|malformed"),
        (changed("points", 0, "dataflow", to="magic"), r"\$\.points\[0\]\.dataflow"),
        (changed("points", 0, "home", to="moon"), r"\$\.points\[0\]\.home"),
        (changed("points", 0, "m", to=1.5), r"\$\.points\[0\]\.m"),
        (changed("points", 0, "speed", to=1), r"`speed` - at `\$\.points\[0\]`"),
        (changed("points", 0, "tiles", "bx", to=7), r"bx must be .* at `\$\.points\[0\]\.tiles`"),
        (changed("points", 0, "tiles", "by", to=7), r"`by` - at `\$\.points\[0\]\.tiles`"),
        (changed("points", 0, "experts", to=4), r"experts are .* at `\$\.points\[0\]`"),
        (changed("points", 1, "experts", to=0), r"experts are .* at `\$\.points\[1\]`"),
        (changed("points", 1, "top_k", to=9), r"top_k must be .* at `\$\.points\[1\]`"),
    ],
)
def test_malformed_files_are_named_by_field(data: bytes, names: str) -> None:
    with pytest.raises(ProfileMalformed, match=names):
        decode_profile(data)


def test_one_measurement_twice_is_malformed() -> None:
    """Tiles that differ only in what `direct` does not read are the same tiles."""
    again = msgspec.structs.replace(POINT, tiles=Tiles(bx=16, slots=9), seconds=2e-4)
    other = msgspec.structs.replace(POINT, tiles=Tiles(bx=16, cluster=2))
    sound = msgspec.structs.replace(assumed_h200(), points=(POINT, other))
    assert decode_profile(encode_profile(sound)) == sound
    document = json.loads(encode_profile(sound))
    document["points"].append(msgspec.to_builtins(again))
    with pytest.raises(ProfileMalformed, match="points has 2 entries"):
        decode_profile(json.dumps(document).encode())


def test_every_dataflow_says_which_tiles_it_reads() -> None:
    assert set(get_args(DataflowName)) == set(DATAFLOWS)
    for fields in (dataflow.tile_fields for dataflow in DATAFLOWS.values()):
        for field in fields:
            assert hasattr(Tiles(), field)
