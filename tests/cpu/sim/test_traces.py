"""Traces: every packaged one, every form of file, and how they become requests."""

import gzip
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest

from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.workload.catalogue import (
    LENGTHS,
    TRACES,
    data_path,
    find_lengths,
    find_rows,
)
from c2cserve.sim.workload.rates import has_rates, sample_requests
from c2cserve.sim.workload.rows import TraceError, read
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue, interleaved

LENGTH_COLUMNS = ("mean", "p50", "p90", "p99")
MODELS = interleaved(catalogue("llama-2-7b*6,llama-2-13b*2"))


def asked(trace: str, **settings: object) -> list[SimRequest]:
    return workload(WorkloadSettings(trace=trace, **settings), MODELS)  # pyright: ignore[reportArgumentType]


def test_azure_functions_as_slinfer_samples_them() -> None:
    rows = find_rows("slinfer128", {})
    assert len(rows) == 9266
    assert len({row.source for row in rows}) == 128
    assert rows[-1].t_s < 1800.0
    assert {len({row.source for row in find_rows(f"slinfer{n}", {})}) for n in (32, 64)} == {32, 64}


def test_azure_conversations() -> None:
    rows = find_rows("azure-conv", {})
    assert len(rows) == 19366
    prompts = sorted(row.prompt for row in rows)
    assert prompts[len(prompts) // 2] == 1020


def test_mooncake_says_what_was_seen_before() -> None:
    requests = asked("mooncake", limit=200)
    shared = {len(set(a.prefix_hashes) & set(b.prefix_hashes)) for a in requests for b in requests}
    assert max(shared) > 100
    assert all(len(r.prefix_hashes) <= r.prompt // 16 for r in requests)


@pytest.mark.parametrize("trace", sorted(TRACES))
def test_packaged_traces_become_requests_of_the_catalogue(trace: str) -> None:
    few: dict[str, object] = {"limit": 300, "duration_s": 3000.0}
    if trace.startswith("servegen"):  # 800 requests a second and more, whole
        few["rate_scale"] = 0.01
    requests = asked(trace, **few)
    names = {model.spec.id for model in MODELS}
    assert len(requests) == 300
    assert {request.model for request in requests} <= names
    assert all(request.prompt >= 1 and request.output >= 1 for request in requests)
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert requests == asked(trace, **few)


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_packaged_lengths(name: str) -> None:
    from random import Random

    draw_one = find_lengths(name)
    pairs = [draw_one(Random(seed)) for seed in range(100)]
    assert all(prompt >= 1 and output >= 1 for prompt, output in pairs)
    assert len(set(pairs)) > 20


def test_time_is_compressed_and_cut() -> None:
    whole = asked("slinfer128")
    part = asked("slinfer128", time_scale=10.0, start_s=60.0, duration_s=120.0)
    inside = [r for r in whole if 60.0 <= r.arrival_s < 180.0]
    assert [r.prompt for r in part] == [r.prompt for r in inside]
    assert part[0].arrival_s == pytest.approx((inside[0].arrival_s - 60.0) / 10.0)


def test_a_share_of_the_requests() -> None:
    assert len(asked("slinfer128", rate_scale=0.25)) == pytest.approx(9266 / 4, rel=0.1)
    with pytest.raises(ValueError, match="no more"):
        asked("slinfer128", rate_scale=2.0)


def write(path: Path, text: str) -> str:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def test_sources_map_to_models_by_number_and_wrap(tmp_path: Path) -> None:
    lines = "".join(f"{i}.0,{func},9,9\n" for i, func in enumerate((10, 2, 10, 0)))
    trace = write(tmp_path / "t.csv", "t_s,func,input_tokens,output_tokens\n" + lines)
    names = [model.spec.id for model in MODELS]
    assert [r.model for r in asked(trace)] == [names[2], names[1], names[2], names[0]]
    shuffled = {tuple(r.model for r in asked(trace, mapping="shuffle", seed=s)) for s in range(9)}
    assert len(shuffled) > 1


def test_models_without_lengths_get_them_and_filters_apply(tmp_path: Path) -> None:
    text = "t_s,model,status\n5,M1,OK\n1,M0,OK\n3,M0,FAILED\n"
    trace = write(tmp_path / "t.csv.gz", text)
    requests = asked(trace, where={"status": "OK"}, lengths="sharegpt")
    assert [r.arrival_s for r in requests] == [1.0, 5.0]
    loads = "load_rps,t_s,func,input_tokens,output_tokens\n1,2.0,4,8,9\n2,1.0,4,6,7\n"
    [one] = asked(write(tmp_path / "b.csv", loads), where={"load_rps": "2"})
    assert (one.prompt, one.output) == (6, 7)


def test_rates_are_met_and_gaps_vary_as_they_say(tmp_path: Path) -> None:
    head = "client,t_s,rate_rps,iat_cv,dist,p1,p2\n"
    text = head + "".join(
        f"7,{600 * i},2.0,2,G,0.25,2\n8,{600 * i},1.0,1,W,1.0,1\n" for i in range(9)
    )
    path = Path(write(tmp_path / "s.csv", text))
    rows = sample_requests(path, 1, 0.0, 5400.0, {})
    bursty = [row.t_s for row in rows if row.source == "7"]
    steady = [row.t_s for row in rows if row.source == "8"]
    assert len(bursty) == pytest.approx(2.0 * 5400, rel=0.1)
    assert len(steady) == pytest.approx(5400, rel=0.1)
    for times, variation in ((bursty, 2.0), (steady, 1.0)):
        gaps = [b - a for a, b in pairwise(times)]
        assert stdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.15)
    assert sample_requests(path, 1, 600.0, 600.0, {}) == [
        r for r in rows if 600.0 <= r.t_s < 1200.0
    ]


def test_requests_per_minute_and_mean_rates(tmp_path: Path) -> None:
    minutes = Path(write(tmp_path / "m.csv", "func,m1,m2\n0,5,0\n1,0,7\n"))
    rows = sample_requests(minutes, 0, 0.0, 1e9, {})
    assert [sum(60 * m <= row.t_s < 60 * (m + 1) for row in rows) for m in (0, 1)] == [5, 7]
    means = Path(write(tmp_path / "r.csv", "model,size,rps_low,rps_high\na,7b,1,10\n"))
    assert len(sample_requests(means, 0, 0.0, 1000.0, {})) == pytest.approx(1000, rel=0.15)
    assert len(sample_requests(means, 0, 0.0, 1000.0, {"rates": "rps_high"})) == pytest.approx(
        1e4, rel=0.1
    )
    with pytest.raises(TraceError, match="rps_low"):
        sample_requests(means, 0, 0.0, 1.0, {"rates": "none"})


@pytest.mark.parametrize("source", ["func", "HashFunction"])
def test_minutes_may_be_named_by_their_numbers(tmp_path: Path, source: str) -> None:
    """So they are in the files of Azure Functions 2019."""
    text = f"HashApp,{source},Trigger,1,2\nx,a,http,5,0\nx,b,timer,0,7\n"
    minutes = Path(write(tmp_path / "m.csv", text))
    assert has_rates(minutes)
    rows = sample_requests(minutes, 0, 0.0, 1e9, {})
    found = [(row.source, row.t_s >= 60.0) for row in rows]
    assert found == [("a", False)] * 5 + [("b", True)] * 7


@pytest.mark.parametrize("columns", ["1,3", "0,1", "1,2,4", "1,01"])
def test_minutes_that_do_not_follow_each_other_are_refused(tmp_path: Path, columns: str) -> None:
    """The requests of the others were left out in silence."""
    counts = ",".join("2" for _ in columns.split(","))
    minutes = Path(write(tmp_path / "m.csv", f"func,{columns}\na,{counts}\n"))
    with pytest.raises(TraceError, match="not those from 1 to"):
        sample_requests(minutes, 0, 0.0, 1e9, {})


@pytest.mark.parametrize("count", ["-2", "2.5", "", "x"])
def test_a_minute_without_a_count_names_its_line(tmp_path: Path, count: str) -> None:
    minutes = Path(write(tmp_path / "m.csv", f"func,1,2\na,1,1\nb,1,{count}\n"))
    with pytest.raises(TraceError, match=r"m\.csv:3: .*minute 2"):
        sample_requests(minutes, 0, 0.0, 1e9, {})


def test_a_line_with_more_fields_than_columns_is_refused(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "m.csv", "func,1,2\na,1,1\nb,1,2,3\n"))
    with pytest.raises(TraceError, match=r"m\.csv:3 has more fields"):
        sample_requests(path, 0, 0.0, 1e9, {})


@pytest.mark.parametrize("t_s", ["nan", "inf", "-inf"])
def test_a_time_that_is_no_number_names_its_line(tmp_path: Path, t_s: str) -> None:
    path = write(tmp_path / "t.csv", f"t_s,model\n1.0,a\n{t_s},b\n")
    with pytest.raises(TraceError, match=r"t\.csv:3: .*finite"):
        read(Path(path))


def test_a_file_of_many_unknown_columns_is_refused_in_one_line(tmp_path: Path) -> None:
    names = ",".join(f"x{i}" for i in range(480))
    path = write(tmp_path / "x.csv", f"{names}\n" + ",".join(["1"] * 480) + "\n")
    with pytest.raises(TraceError, match="and 474 more") as caught:
        read(Path(path))
    assert len(str(caught.value)) < 200


def test_clients_ask_as_often_and_for_as_much_as_they_say(tmp_path: Path) -> None:
    of = "mean_rps,active_frac_10min,has_lengths"
    lengths = ",".join(f"{f}_tokens_{q}" for f in ("input", "output") for q in LENGTH_COLUMNS)
    text = (
        f"model,client,{of},{lengths}\n"
        "s,0,2.0,0.25,1,300,200,500,900,20,20,30,60\ns,1,1.0,1,0,,,,,,,,\nl,0,1.0,1,0,,,,,,,,\n"
    )
    path = Path(write(tmp_path / "c.csv", text))
    rows = sample_requests(path, 3, 0.0, 600.0 * 200, {"model": "s"})
    assert {row.source for row in rows} == {"s/0", "s/1"}
    some = [row for row in rows if row.source == "s/0"]
    assert len(some) == pytest.approx(0.25 * 2.0 * 600 * 200, rel=0.2)
    assert len({row.t_s // 600 for row in some}) == pytest.approx(0.25 * 200, rel=0.2)
    assert mean(row.prompt for row in some) == pytest.approx(300, rel=0.02)
    for field, share in (("prompt", (200, 500, 900)), ("output", (20, 30, 60))):
        values = sorted(getattr(row, field) for row in some)
        found = [values[int(q * len(values))] for q in (0.5, 0.9, 0.99)]
        assert found == pytest.approx(share, rel=0.05)
    other = [row for row in rows if row.source == "s/1"]
    assert len(other) == pytest.approx(600 * 200, rel=0.05)
    assert {(row.prompt, row.output) for row in other} == {(0, 0)}
    assert sample_requests(path, 3, 1200.0, 600.0, {"model": "s"}) == [
        r for r in rows if 2 <= r.t_s // 600 < 3
    ]
    with pytest.raises(TraceError, match="no clients like these"):
        sample_requests(path, 3, 0.0, 60.0, {"model": "other"})


def test_files_of_lengths_are_no_traces_and_say_so() -> None:
    for name in ("lengths.csv.gz", "servegen_length_quantiles.csv.gz"):
        with pytest.raises(TraceError, match="use it with --lengths"):
            asked(str(data_path(name)))
    draws = find_lengths(f"{data_path('servegen_length_quantiles.csv.gz')}:m-small")
    assert draws(Random(1)) == find_lengths("servegen")(Random(1))


def test_a_synthetic_trace_has_so_many_times_the_requests() -> None:
    few, many = (asked("synthetic:rate=2,duration=300", rate_scale=scale) for scale in (0.5, 3.0))
    assert len(few) == pytest.approx(300, rel=0.2)
    assert len(many) == pytest.approx(1800, rel=0.2)


def test_a_synthetic_trace_has_no_columns() -> None:
    with pytest.raises(ValueError, match="no columns"):
        asked("synthetic:rate=2", where={"model": "a"})


def test_synthetic_workloads_follow_their_numbers() -> None:
    requests = asked("synthetic:rate=20,duration=500,sources=8,zipf=1,prompt=100,output=50")
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    assert mean(r.prompt for r in requests) == pytest.approx(100, rel=0.05)
    counts = [sum(r.model == model.spec.id for r in requests) for model in MODELS]
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.15)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("nowhere.csv", "slinfer128"),
        ("synthetic:rate=-1", "greater than 0"),
        ("synthetic:speed=1", "speed"),
        ("synthetic:rate", "KEY=NUMBER"),
    ],
)
def test_mistakes_are_named(trace: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        asked(trace)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="columns that no trace has"):
        read(Path(write(tmp_path / "a.csv", "x,y\n1,2\n")))
    with pytest.raises(TraceError, match="no requests"):
        read(Path(write(tmp_path / "b.csv", "t_s,model\n")))
    with pytest.raises(TraceError, match=r"c\.csv:3"):
        read(Path(write(tmp_path / "c.csv", "t_s,model\n1,a\nx,b\n")))
    (tmp_path / "d.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(TraceError, match="not CSV"):
        read(tmp_path / "d.csv.gz")


def test_a_file_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """It begins with a byte order mark, and its lines end as on Windows."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbft_s,func,input_tokens,output_tokens\r\n1,a,100,10\r\n")
    [row] = read(path)
    assert (row.t_s, row.source, row.prompt, row.output) == (1.0, "a", 100, 10)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-5,a,100,10", "t_s is -5"),
        ("1e30,a,100,10", "t_s is 1e30"),
        ("1,a,1e3,10", "input_tokens is no whole number: '1e3'"),
        ("1,a,100", "output_tokens is no whole number: ''"),
        ("1,a,100,-1", "output_tokens is -1"),
        ("1,a,-3,10", "input_tokens is -3"),
        ("x,a,1,1", "t_s is no number: 'x'"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(
    tmp_path: Path, line: str, says: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"t_s,func,input_tokens,output_tokens\n0,a,1,1\n{line}\n")
    with pytest.raises(TraceError, match=re.escape(f"t.csv:3: {says}")):
        read(path)


def test_a_request_without_an_output_counts_as_one_of_a_token(tmp_path: Path) -> None:
    """Logs have such lines for requests that failed."""
    path = tmp_path / "t.csv"
    path.write_text("t_s,func,input_tokens,output_tokens\n1,a,100,0\n")
    assert [one.output for one in asked(str(path))] == [1]
