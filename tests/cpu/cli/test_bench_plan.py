"""What a benchmark sends: lengths, popularity, arrivals, and how traces are read."""

import gzip
import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.bench.plan import (
    Caps,
    TraceOptions,
    dataset_lengths,
    parse_lengths,
    parse_popularity,
    poisson,
    sampled_lengths,
    trace,
)
from c2cserve.bench.prompts import Options, Prompts, Style
from c2cserve.bench.report import percentile
from c2cserve.terminal.output import CliError


def draws(text: str, count: int = 4000) -> list[int]:
    rng = random.Random(0)
    lengths = parse_lengths(text)
    return [lengths(rng) for _ in range(count)]


def test_lengths() -> None:
    assert set(draws("128")) == {128}
    assert set(draws("3-5")) == {3, 4, 5}
    assert fmean(draws("exp:100")) == pytest.approx(100, rel=0.05)
    assert median(draws("lognormal:120:0.8")) == pytest.approx(120, rel=0.05)
    assert min(draws("exp:1")) >= 1


def test_popularity() -> None:
    assert parse_popularity("uniform", ["a", "b"]) == [1, 1]
    assert parse_popularity("zipf:1", ["a", "b", "c"]) == pytest.approx([1, 1 / 2, 1 / 3])
    with pytest.raises(CliError):
        parse_popularity("linear", ["a"])


def test_poisson_gaps_are_memoryless() -> None:
    pairs = sampled_lengths(parse_lengths("8"), parse_lengths("8"))
    shapes = poisson(["a"], [1], 10.0, 5000, None, pairs, random.Random(0))
    gaps = [b.due_s - a.due_s for a, b in pairwise(shapes)]
    mean = fmean(gaps)
    variance = fmean((gap - mean) ** 2 for gap in gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert variance**0.5 / mean == pytest.approx(1.0, rel=0.05)
    assert all(
        shape.due_s <= 3 for shape in poisson(["a"], [1], 10, None, 3, pairs, random.Random(0))
    )


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


TRACE = "t_s,func,load,input_tokens,output_tokens\n5,7,x,10,1\n1,9,x,20,2\n3,9,y,30,3\n4,9,x,40,4\n"


def test_trace_is_sorted_shifted_mapped_and_compressed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv.gz", TRACE)
    pairs = sampled_lengths(parse_lengths("1"), parse_lengths("1"))
    options = TraceOptions(path, {}, compress=2.0)
    shapes = trace(options, ["a", "b"], pairs, random.Random(0))
    assert [(s.model, s.input_tokens, s.due_s) for s in shapes] == [
        ("a", 20, 0.0), ("a", 30, 1.0), ("a", 40, 1.5), ("b", 10, 2.0),
    ]  # fmt: skip
    only = TraceOptions(path, {"load": "x"}, duration_s=3.5)
    assert [s.input_tokens for s in trace(only, ["a"], pairs, random.Random(0))] == [20, 40]
    assert len(trace(TraceOptions(path, {}, requests=2), ["a"], pairs, random.Random(0))) == 2


def test_trace_without_models_or_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "t_ms\n" + "\n".join(str(100 * i) for i in range(200)))
    pairs = sampled_lengths(parse_lengths("5"), parse_lengths("6"))
    shapes = trace(TraceOptions(path, {}), ["a", "b"], pairs, random.Random(0))
    assert {(s.model, s.input_tokens, s.output_tokens) for s in shapes} == {
        ("a", 5, 6), ("b", 5, 6),
    }  # fmt: skip
    assert shapes[-1].due_s == pytest.approx(19.9)


def test_dataset(tmp_path: Path) -> None:
    text = "dataset,input_tokens,output_tokens\np,10,1\np,20,2\nq,30,3\n"
    pairs = dataset_lengths(write(tmp_path / "d.csv", text), {"dataset": "p"})
    rng = random.Random(0)
    assert {pairs(rng) for _ in range(50)} == {(10, 1), (20, 2)}


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("a,b\n1,2\n", {}, "needs a column t_s"),
        ("t_s\n", {}, "no rows"),
        (TRACE, {"load": "z"}, "no rows"),
        (TRACE, {"weight": "z"}, "no column 'weight'"),
        ("t_s\nsoon\n", {}, "not a time"),
        ("t_s,input_tokens,output_tokens\n1,few,2\n", {}, "is not a number"),
    ],
)
def test_broken_traces(tmp_path: Path, text: str, where: dict[str, str], says: str) -> None:
    path = write(tmp_path / "t.csv", text)
    pairs = sampled_lengths(parse_lengths("1"), parse_lengths("1"))
    with pytest.raises(CliError, match=says):
        trace(TraceOptions(path, where), ["a"], pairs, random.Random(0))


def test_caps() -> None:
    assert Caps(10, 5).apply(100, 100) == (10, 5)
    assert Caps().apply(0, 0) == (1, 1)


def test_prompts_share_no_prefix_and_repeat_by_seed() -> None:
    from c2cserve.bench.plan import Shape

    shapes = [Shape("m", 32, 1)] * 200
    style = {"m": Style(ids=True)}
    bodies = [one.body for one in Prompts(1, Options()).plan(shapes, style)]
    assert len(set(bodies)) == 200
    assert bodies == [one.body for one in Prompts(1, Options()).plan(shapes, style)]
    assert bodies != [one.body for one in Prompts(2, Options()).plan(shapes, style)]


@given(values=st.lists(st.floats(0, 1e3), min_size=1, max_size=50), share=st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    import numpy as np

    expected = float(np.quantile(values, share))
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-9)
