"""The load generator against a server whose delays are known."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai import fake_openai

from c2cserve.cli.main import app


def bench(tmp_path: Path, url: str, *args: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as done:
        app(["bench", "serve", "--url", url, "--out", str(out), *args])
    assert done.value.code == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


@pytest.mark.alone
def test_measured_times_are_the_servers(tmp_path: Path) -> None:
    with fake_openai(ttft_s=0.05, tpot_s=0.01) as url:
        results = bench(
            tmp_path, url, "--concurrency", "4", "--requests", "40", "--output-len", "11",
            "--input-len", "30",
        )["results"]  # fmt: skip
    total = results["total"]
    assert total["ok"] == total["requests"] == 40
    assert total["ttft_s"]["p50"] == pytest.approx(0.05, abs=0.005)
    assert total["tpot_s"]["p50"] == pytest.approx(0.01, abs=0.001)
    assert total["itl_s"]["p50"] == pytest.approx(0.01, abs=0.002)
    assert total["e2e_s"]["p50"] == pytest.approx(0.15, abs=0.01)
    assert total["prompt_tokens"] == 40 * 30
    assert total["output_tokens"] == 40 * 11
    assert total["requests_per_s"] == pytest.approx(4 / 0.15, rel=0.15)
    assert total["output_tokens_per_s"] == pytest.approx(11 * total["requests_per_s"])
    assert total["slo_attainment"] == 1.0
    assert results["generator"]["cpu_s_per_request"] < 5e-3


@pytest.mark.alone
def test_slo_attainment_counts_both_targets(tmp_path: Path) -> None:
    with fake_openai(ttft_s=0.03, tpot_s=0.02) as url:
        common = ("--requests", "8", "--output-len", "4")
        for slo, attained in (
            (("--slo-ttft", "0.1", "--slo-tpot", "0.1"), 1.0),
            (("--slo-ttft", "0.01", "--slo-tpot", "0.1"), 0.0),
            (("--slo-ttft", "0.1", "--slo-tpot", "0.01"), 0.0),
        ):
            total = bench(tmp_path, url, *common, *slo)["results"]["total"]
            assert total["slo_attainment"] == attained
            assert (total["goodput_per_s"] > 0) == (attained > 0)


def test_an_open_loop_sees_a_stall_in_every_request_it_delayed(tmp_path: Path) -> None:
    """A closed loop's few users wait out a stall and report it only once each (coordinated
    omission); the open loop keeps sending, and counts from when each request was due."""
    stall = {"ttft_s": 0.001, "stall_s": 0.5, "stall_after_s": 0.5}
    common = ("--duration", "2", "--output-len", "1", "--prompt", "text")
    with fake_openai(**stall) as url:
        open_loop = bench(tmp_path, url, "--mode", "poisson", "--rate", "100", *common)
    with fake_openai(**stall) as url:
        closed = bench(tmp_path, url, "--concurrency", "1", *common)
    # A quarter of the arrivals fall into the stall and wait half of it on average.
    total = open_loop["results"]["total"]
    assert 150 < total["requests"] < 250
    assert total["ttft_s"]["p90"] == pytest.approx(0.3, abs=0.15)
    assert 0.45 < total["ttft_s"]["max"] < 0.8
    assert closed["results"]["total"]["ttft_s"]["p90"] < 0.1
    # Sending did not wait for the stall to end, however busy the machine is.
    assert open_loop["results"]["generator"]["send_lag_s"]["p99"] < 0.25


def test_poisson_rate_and_seed(tmp_path: Path) -> None:
    args = ("--mode", "poisson", "--rate", "200", "--requests", "200", "--output-len", "1-3")
    with fake_openai(models="a,b") as url:
        one = bench(tmp_path, url, "--model", "all", "--seed", "1", *args)["results"]
        again = bench(tmp_path, url, "--model", "all", "--seed", "1", *args)["results"]
        other = bench(tmp_path, url, "--model", "a,b", "--seed", "2", *args)["results"]
    assert 0.75 < one["elapsed_s"] < 2.5
    assert set(one["per_model"]) == {"a", "b"}
    assert one["total"]["output_tokens"] == again["total"]["output_tokens"]
    assert one["per_model"]["a"]["requests"] == again["per_model"]["a"]["requests"]
    assert one["total"]["output_tokens"] != other["total"]["output_tokens"]


def test_errors_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai(refuse_every=5, break_every=7) as url:
        results = bench(
            tmp_path, url, "--requests", "100", "--concurrency", "1", "--prompt", "ids",
            "--output-len", "2",
        )["results"]  # fmt: skip
    total = results["total"]
    assert total["errors"].keys() == {"http 429", "disconnected"}
    assert total["ok"] + sum(total["errors"].values()) == 100
    assert total["slo_attainment"] == pytest.approx(total["ok"] / 100)
    assert "busy" in capsys.readouterr().err


def test_timeout_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with fake_openai(stall_s=1.5, stall_after_s=0.1) as url:
        total = bench(
            tmp_path, url, "--mode", "poisson", "--rate", "50", "--requests", "20", "--timeout",
            "0.3", "--output-len", "1", "--prompt", "text",
        )["results"]["total"]  # fmt: skip
    assert total["errors"]["timeout"] + total["ok"] == 20
    assert total["ok"] > 0


def test_kept_connections_that_the_server_closes_cost_no_request(tmp_path: Path) -> None:
    with fake_openai(close_every=3) as url:
        total = bench(tmp_path, url, "--requests", "60", "--output-len", "1")["results"]["total"]
    assert total["ok"] == 60


def test_text_prompts_come_near_the_wanted_length(tmp_path: Path) -> None:
    with fake_openai(ids=0) as url:
        for endpoint in ("completions", "chat"):
            total = bench(
                tmp_path, url, "--endpoint", endpoint, "--requests", "10", "--input-len", "101",
            )["results"]["total"]  # fmt: skip
            assert total["prompt_tokens"] / 10 == pytest.approx(101, abs=2)


def test_without_usage_pieces_are_counted(tmp_path: Path, capsys: Any) -> None:
    with fake_openai(usage=0) as url:
        total = bench(tmp_path, url, "--requests", "3", "--output-len", "7")["results"]["total"]
    assert total["output_tokens"] == 21
    assert "no usage" in capsys.readouterr().err


@pytest.mark.alone
def test_processes_share_one_load(tmp_path: Path) -> None:
    with fake_openai(ttft_s=0.02) as url:
        results = bench(
            tmp_path, url, "--mode", "poisson", "--rate", "100", "--requests", "100",
            "--processes", "2", "--output-len", "1",
        )["results"]  # fmt: skip
    assert results["total"]["ok"] == 100
    assert results["total"]["ttft_s"]["p50"] == pytest.approx(0.02, abs=0.006)
    assert results["elapsed_s"] == pytest.approx(1.0, rel=0.3)


@pytest.mark.alone
def test_trace(tmp_path: Path) -> None:
    rows = ["t_s,func,input_tokens,output_tokens"]
    rows += [f"{100 + i},{'x' if i % 3 else 'y'},{500 + i},{40 + i}" for i in range(30)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows))
    with fake_openai(models="a,b") as url:
        results = bench(
            tmp_path, url, "--mode", "trace", "--trace", str(path), "--compress", "30",
            "--input-cap", "510", "--output-cap", "3",
        )["results"]  # fmt: skip
    assert results["elapsed_s"] == pytest.approx(29 / 30, rel=0.1)
    assert results["per_model"]["a"]["requests"] == 20, "the most popular one gets the first model"
    assert results["per_model"]["b"]["requests"] == 10
    assert results["total"]["prompt_tokens"] == sum(min(500 + i, 510) for i in range(30))
    assert results["total"]["output_tokens"] == 90


def test_key(tmp_path: Path) -> None:
    with fake_openai(key="secret") as url:
        total = bench(tmp_path, url, "--key", "secret", "--requests", "2")["results"]["total"]
    assert total["ok"] == 2


def test_results_say_how_they_were_made(tmp_path: Path) -> None:
    with fake_openai() as url:
        document = bench(tmp_path, url, "--requests", "2", "--seed", "7")
    assert document["benchmark"] == "serve"
    assert document["config"]["seed"] == 7
    assert document["config"]["mode"] == "closed"
    assert document["machine"]["cpus"] >= 1
    assert document["version"]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--url", "localhost:8000"), 2, "not a URL"),
        (("--url", "http://127.0.0.1:9"), 1, "no server at"),
        (("--url", "http://127.0.0.1:9", "--model", "m"), 1, "connect"),
        (("--input-len", "x"), 2, "not a length"),
        (("--input-len", "9-3"), 2, "not a length"),
        (("--popularity", "zipf:a"), 2, "not a popularity"),
        (("--mode", "trace"), 2, "--trace"),
        (("--mode", "trace", "--trace", "none.csv"), 1, "none.csv"),
        (("--concurrency", "1", "--processes", "2"), 2, "1 users"),
        (("--where", "x"), 2, "COLUMN=VALUE"),
        (("--mode", "often"), 2, "often"),
    ],
)
def test_mistakes_are_one_line(
    args: tuple[str, ...], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_openai() as url, pytest.raises(SystemExit) as done:
        app(["bench", "serve", *(() if "--url" in args else ("--url", url)), *args])
    assert done.value.code == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert says in lines[0]
