"""The weights mix without a GPU: its cells, requests and figures, and the simulated half of it."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mix_checkpoints
import pytest
import weights_mix
from documents.commands import check
from mix_checkpoints import Checkpoints
from mix_load import (
    FULL,
    SLO,
    TINY,
    Answer,
    Arena,
    figures,
    median_interval,
    paired,
    parse_cells,
    popularity,
    requests,
    warm_up,
)
from mix_machine import Host, Refused, imagined_machine, this_machine, weights_bytes_per_s
from mix_run import steps_line, weights_line
from mix_simulated import simulate, simulated_machine, simulated_models

from c2cserve.bench.plan import Shape as Asked
from c2cserve.catalog.file import load_catalog
from c2cserve.core.step import Step
from c2cserve.devices.plan import SliceWishes, plan_all
from c2cserve.runtime.slice_stats import STATS
from c2cserve.serving.startup import with_links
from c2cserve.sim.world.costs import Costs, StepCost
from c2cserve.sim.world.shapes import SimModel

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
NAMES = [entry.id for entry in FULL.pick().entries]


def run(tmp_path: Path, *arguments: str) -> Any:
    out = tmp_path / "mix.json"
    weights_mix.main([*arguments, "--pool-dir", str(tmp_path), "--out", str(out)])
    return json.loads(out.read_text())


# ---- the load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first_s", [0.0, 0.5])
def test_slow_first_steps_refuse_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch, first_s: float
) -> None:
    """All models fit. The first prefill of each takes half a second more, as memory is registered.
    Step times are learned as on a server: no request may be refused for what is over."""
    host = imagined_machine(H200, None)
    arena = Arena("all", None)
    seen: set[str] = set()
    known = Costs.step

    def step(self: Costs, step: Step, model: SimModel, *given: Any) -> StepCost:
        cost = known(self, step, model, *given)
        new = model.spec.id not in seen
        seen.add(model.spec.id)
        return replace(cost, floor_s=cost.floor_s + first_s * new)

    monkeypatch.setattr(Costs, "step", step)
    models = simulated_models(FULL.pick())
    found = simulate(
        host, host.plan(arena, 0), arena, models, None, requests(FULL, NAMES, 8.0, 75, 1),
        warm_up(FULL, NAMES), 1, 60.0,
    )  # fmt: skip
    assert figures(found.answers)["in_time"] == 1.0


def test_cells_are_parsed() -> None:
    cells = parse_cells("all:2,30+90:0.5,0.05:4")
    assert [cell.text for cell in cells] == ["all:2", "30+90:0.5", "0.05:4"]
    assert [(cell.arena.bytes, cell.arena.lent_bytes) for cell in cells] == [
        (None, 0), (30 * 10**9, 90 * 10**9), (50 * 10**6, 0),
    ]  # fmt: skip
    assert [cell.rate for cell in cells] == [2.0, 0.5, 4.0]


@pytest.mark.parametrize(
    "text",
    ["30", "30:", "x:2", "30:0", "30:2,", "0:2", "30+-1:2", "1:2:3", "inf:2", "30:nan", "1+all:2"],
)
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a cell"):
        parse_cells(text)


def test_default_cells_are_cells() -> None:
    for mix in (FULL, TINY):
        assert parse_cells(mix.cells)


def test_requests_depend_on_the_seed_and_only_their_times_on_the_rate() -> None:
    slow, fast = (requests(FULL, NAMES, rate, 400, seed=1) for rate in (2.0, 8.0))
    assert [(r.model, r.input_tokens, r.output_tokens) for r in slow] == [
        (r.model, r.input_tokens, r.output_tokens) for r in fast
    ]
    assert slow[-1].due_s == pytest.approx(4 * fast[-1].due_s)
    assert 120 < slow[-1].due_s < 280
    assert requests(FULL, NAMES, 2.0, 400, seed=2) != slow
    assert all(16 <= r.input_tokens <= 4096 and 8 <= r.output_tokens <= 400 for r in slow)
    assert 400 < sorted(r.input_tokens for r in slow)[200] < 650
    assert 50 < sum(r.output_tokens for r in slow) / 400 < 80
    asked = Counter(r.model for r in slow)
    assert max(asked, key=lambda name: asked[name]) == NAMES[0]
    assert popularity(4) == [1.0, 1 / 2, 1 / 3, 1 / 4]


def test_the_catalogue_has_five_and_three_models() -> None:
    made = FULL.pick()
    assert Counter(entry.shape for entry in made.entries) == {"llama-3b": 5, "llama-8b": 3}
    assert made.scale == 1
    assert 78e9 < made.bytes < 82e9


def test_an_answer_that_is_not_whole_and_in_time_is_missed() -> None:
    answers = [
        Answer("a", "answered", 0.9, 0.09), Answer("a", "answered", 0.5), Answer("a", "refused"),
        Answer("b", "answered", 1.1, 0.01), Answer("b", "answered", 0.1, 0.11),
        Answer("b", "unanswered", 0.1), Answer("b", "unanswered"),
        Answer("b", "failed", why="protocol: broken"),
    ]  # fmt: skip
    found = figures(answers)
    assert found["in_time"] == 2 / 8
    kinds = ("answered", "refused", "unanswered", "failed")
    assert [found[kind] for kind in kinds] == [4, 1, 2, 1]
    assert found["ttft_p50_s"] == 0.5
    assert found["tpot_p50_s"] == 0.09
    assert found["errors"] == ["protocol: broken"]
    assert found["models"]["a"]["in_time"] == pytest.approx(2 / 3)
    assert found["models"]["b"]["requests"] == 5
    assert figures([Answer("a", "refused")])["ttft_p50_s"] is None


def test_first_tokens_that_wait_for_a_load_have_a_median_of_their_own() -> None:
    found = figures([Answer("a", "answered", took_s) for took_s in (0.3, 0.02, 0.4, 0.03)], 0.1)
    assert (found["sooner"], found["ttft_p50_s"]) == (2, pytest.approx(0.165))
    assert found["ttft_sooner_p50_s"] == pytest.approx(0.025)
    assert found["ttft_later_p50_s"] == pytest.approx(0.35)
    assert found["first_s"] == [0.3, 0.02, 0.4, 0.03], "in the order of the requests"
    assert found["ttft_p50_low_s"] is None, "four are too few"


def test_requests_are_compared_one_by_one() -> None:
    """Half of them wait for a load: the medians differ by ten times, each request by a tenth."""
    live = figures([Answer("a", "answered", took_s, 0.01) for took_s in (0.02, 0.02, 0.2)])
    simulated = figures([
        Answer("a", "answered", 0.022, 0.02), Answer("a", "answered", 0.22),
        Answer("a", "answered", 0.22, 0.02),
    ])  # fmt: skip
    assert simulated["ttft_p50_s"] / live["ttft_p50_s"] > 10
    assert paired(live, simulated) == pytest.approx({"ttft_ratio": 1.1, "tpot_ratio": 2.0})
    assert paired({}, simulated) == {"ttft_ratio": None, "tpot_ratio": None}


def test_a_median_has_an_interval() -> None:
    """Of 20 values the sixth to the fifteenth, by the binomial distribution."""
    assert median_interval([float(value) for value in range(1, 21)]) == (6.0, 16.0)


# ---- the machine --------------------------------------------------------------------------------


def test_lent_memory_serves_the_popular_models_first() -> None:
    speeds = imagined_machine(H200, None).speeds
    models = [(10**9, 1.0), (10**9, 0.5)]
    host, peer = speeds.h2d_bytes_per_s, speeds.peer_bytes_per_s
    assert weights_bytes_per_s(speeds, 0, models) == pytest.approx(host)
    assert weights_bytes_per_s(speeds, 2 * 10**9, models) == pytest.approx(peer)
    half = weights_bytes_per_s(speeds, 10**9, models)
    assert half == pytest.approx(1.5 / (1.0 / peer + 0.5 / host))


def test_both_worlds_have_the_slice_and_the_link_of_the_server() -> None:
    host = imagined_machine(H200, None)
    assert host.profile == "assumed"
    wishes = SliceWishes(
        gpu_slices="whole@0", gpu_kv_bytes=30 * 10**9, gpu_profile="assumed",
        gpu_peer_bytes=90 * 10**9, host_kv_bytes=10**9,
    )  # fmt: skip
    [served] = with_links(plan_all(host.machine, wishes), host.gpus)
    arena = Arena("30+90", 30 * 10**9, 90 * 10**9)
    planned = host.plan(arena, 10**9)
    assert planned == served
    machine = simulated_machine(host, planned, arena, simulated_models(FULL.pick()), None)
    [simulated] = machine.slices
    assert replace(simulated.slice, link=served.link) == served
    assert simulated.load_bytes_per_s > served.link_bytes_per_s, "lent weights come faster"


def test_what_a_server_counts_of_weights_is_a_line() -> None:
    counters = {
        "weight_fetches_total": 3.0, "weight_fetched_bytes_total": 2e9,
        "weight_fetch_seconds_total": 0.5, "weight_fetches_refused_total": 1.0,
        "weight_releases_total": 2.0, "weights_hit_bytes_total": 5e9,
        "weights_streamed_bytes_total": 4e9, "weights_peer_bytes_total": 1e9,
    }  # fmt: skip
    assert weights_line(counters) == (
        "3 loads of 2.0 GB in 0.5 s, 0 cancelled, 1 refused, 2 released;"
        " steps read 5.0 GB in HBM, 4.0 GB streamed (1.0 GB of them lent)"
    )
    rows = {stat.metric for stat in STATS}
    assert {f"c2cserve:slice_{name.removesuffix('_total')}" for name in counters} <= rows


def test_what_a_server_counts_of_steps_is_a_line() -> None:
    seconds = (
        "in_flight", "bubble", "loading_bubble", "contended", "step_wait", "policy", "submit",
        "action", "poll", "sleep",
        *(f"{kind}_{name}" for kind in ("prefill", "decode", "switched")
          for name in ("compute", "batch", "launch", "completion")),
    )  # fmt: skip
    counters = {f"{name}_seconds_total": float(i) for i, name in enumerate(seconds)}
    counters |= {"steps_total": 9.0, "prefill_steps_total": 2.0, "switched_steps_total": 3.0}
    assert steps_line(counters) == (
        "p/d/s 2/4/3 steps: computing 10.00/14.00/18.00 s of 0.00 in flight;"
        " without a step 1.00 (2.00 beside loads), contended 3.00;"
        " host: batch 11.00/15.00/19.00, launch 12.00/16.00/20.00,"
        " completion 13.00/17.00/21.00, wait 4.00; policy 5.00, submit 6.00, actions 7.00,"
        " polls 8.00, asleep 9.00"
    )
    assert steps_line({"steps_total": 9.0}) == "not counted: an earlier server"
    rows = {stat.metric for stat in STATS}
    assert {f"c2cserve:slice_{name.removesuffix('_total')}" for name in counters} <= rows


@pytest.mark.parametrize(
    ("arena", "slice_id"),
    [(Arena("all", None), "gpu0"), (Arena("30+90", 30 * 10**9, 90 * 10**9), "gpu0")],
)
def test_the_server_is_told_what_was_planned(arena: Arena, slice_id: str) -> None:
    host = imagined_machine(H200, None)
    slice_ = host.plan(arena, 10**9)
    assert slice_.id == slice_id
    assert slice_.host_kv_bytes == 10**9
    assert slice_.gpu is not None
    assert slice_.gpu.lent_bytes == arena.lent_bytes
    arguments = host.serve_arguments(arena, 10**9)
    check(["c2cserve", "serve", "--catalog", "catalog.toml", *arguments])
    assert ("--gpu-kv-bytes" in arguments) == (arena.bytes is not None)


def test_a_cpu_slice_is_told_its_arena() -> None:
    arguments = this_machine(None, tiny=True).serve_arguments(Arena("1", 10**9), 0)
    check(["c2cserve", "serve", "--catalog", "catalog.toml", *arguments])
    assert arguments[arguments.index("--kv-bytes") + 1] == "1000000000"
    assert arguments[arguments.index("--gpu-slices") + 1] == "none"


def one_gpu() -> Host:
    host = imagined_machine(H100, None)
    return replace(host, machine=replace(host.machine, gpus=host.gpus[:1]))


@pytest.mark.parametrize(
    ("arena", "says"),
    [
        (Arena("90", 90 * 10**9), "KV arenas of 8"),
        (Arena("30+9", 30 * 10**9, 9 * 10**9), "no GPU can lend memory"),
    ],
)
def test_what_a_machine_cannot_do_is_refused_in_one_line(arena: Arena, says: str) -> None:
    with pytest.raises(Refused, match=says) as found:
        one_gpu().plan(arena, 0)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cells", "1+1:2", "--tiny"), "GPUs lend memory to GPU slices: there are none"),
        (("--cells", "500:2", "--simulate-only"), "500: GPU 0: 1 KV arenas of"),
        (("--profile", "gone.json", "--simulate-only"), "gone.json"),
    ],
)
def test_a_refused_run_ends_with_one_line(
    arguments: Sequence[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=says) as found:
        run(tmp_path, *arguments)
    assert "\n" not in str(found.value)
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix_checkpoints, "memory_bytes", lambda: {"MemAvailable": 10**6})
    with pytest.raises(SystemExit, match=r"host memory: 0\.2 GB are needed for .*, 0\.0 GB"):
        run(tmp_path, "--tiny", "--cells", "0.05:4")
    assert not list(tmp_path.iterdir())


# ---- simulated ----------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # six simulations
def test_simulated_cells_are_reported_and_simulated_again(tmp_path: Path) -> None:
    arguments = "--cells", "all:8,30:4,30+90:4", "--requests", "24", "--seeds", "3,4"
    whole = run(tmp_path, "--simulate-only", "--gpu", H200, *arguments)
    assert whole["machine"]["cpu"]
    assert whole["date"]
    assert "commit" in whole
    rows = {row["cell"]: row for row in whole["results"]["rows"]}
    assert list(rows) == ["all:8", "30:4", "30+90:4"]
    assert all(row["simulated"]["requests"] == 24 for row in rows.values())
    fetches = {cell: row["simulated"]["fetches"] for cell, row in rows.items()}
    assert 0 < fetches["all:8"] < fetches["30:4"], "in a small arena models take turns"
    assert rows["all:8"]["simulated"]["in_time"] == 1.0
    first = [rows[cell]["simulated"]["ttft_p50_s"] for cell in ("all:8", "30+90:4", "30:4")]
    assert first == sorted(first), "a slower way for weights gives later first tokens"
    assert 135e9 < rows["all:8"]["arena_bytes"] < 145e9
    assert rows["30+90:4"]["lent_bytes"] == 90e9
    earlier = tmp_path / "earlier.json"
    (tmp_path / "mix.json").rename(earlier)
    again = run(tmp_path, "--again", str(earlier))
    assert again["results"]["rows"] == whole["results"]["rows"]


def test_simulated_answers_are_in_the_order_of_their_requests() -> None:
    """A short answer that was asked for after a long one ends before it."""
    host = imagined_machine(H200, None)
    arena, models = Arena("70", 70 * 10**9), simulated_models(FULL.pick())
    long, short = models[0].spec.id, models[1].spec.id
    asked = [Asked(long, 64, 200, 0.0), Asked(short, 64, 8, 0.001)]
    warm = [Asked(name, 16, 8, 2.0 * i) for i, name in enumerate((long, short))]
    plan = host.plan(arena, 4 * 10**9)
    found = simulate(host, plan, arena, models, None, asked, warm, 1, 60.0)
    assert [answer.model for answer in found.answers] == [long, short]


@pytest.mark.timeout(300)  # matplotlib, when it is first imported
def test_rows_are_drawn_and_of_one_cell_the_last_counts(tmp_path: Path) -> None:
    figures_ = {"in_time": 0.9, "ttft_p50_s": 0.1, "tpot_p50_s": None}
    row = {"cell": "30:2", "arena_bytes": 3e10, "lent_bytes": 0, "rate": 2.0, "live": figures_}
    catalogue = {"models": ["a"], "bytes": 1e9}
    results = {
        "rows": [row], "host": {"gpus": [H200]}, "catalogue": catalogue,
        "slo": {"ttft_s": 1.0, "tpot_s": 0.1},
    }  # fmt: skip
    first = {"date": "2026-11-22", "commit": "abc", "results": results}
    second = {**first, "results": {**results, "rows": [{**row, "simulated": figures_}]}}
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, whole in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(whole))
    weights_mix.main(["--plot", *map(str, paths), "--images", str(tmp_path)])
    assert (tmp_path / "weights_mix.png").stat().st_size > 10_000


def test_what_ends_too_late_is_unanswered(tmp_path: Path) -> None:
    cells = "--cells", "30:4", "--requests", "20", "--seeds", "1", "--answer-s", "0.2"
    found = run(tmp_path, "--simulate-only", "--gpu", H200, *cells)
    simulated = found["results"]["rows"][0]["simulated"]
    assert simulated["unanswered"] > 0
    assert simulated["answered"] + simulated["unanswered"] + simulated["refused"] == 20


# ---- checkpoints --------------------------------------------------------------------------------


def test_checkpoints_are_written_whole_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tiny-llama").write_text("what an interrupted run has left")
    made = replace(TINY.pick(), entries=TINY.pick().entries[:1])
    checkpoints = Checkpoints(folder, tmp_path, made, 0)
    checkpoints.check_room(None)
    catalog = load_catalog(checkpoints.written())
    [entry] = list(catalog)
    assert (entry.id, entry.slo) == (made.entries[0].id, SLO)
    (folder / "kept").touch()
    checkpoints.written()
    assert (folder / "kept").exists(), "nothing is written a second time"
