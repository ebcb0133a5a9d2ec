"""`models` and `top` against an admin API over real sockets."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_admin import FakeAdmin, model
from rich.console import Console

from c2cserve.bench.scrape import Scrape
from c2cserve.cli.main import app
from c2cserve.cli.top import Sample, frame
from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import NodeUse, SliceStatus, Snapshot


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        app(args)
    assert isinstance(done.value.code, int)
    return done.value.code


def test_list(capsys: Any) -> None:
    failed = model("b", state=ModelState.FAILED, error="tensor [x] missing")
    loading = model("org/c", state=ModelState.LOADING, loaded_bytes=1 << 30)
    with FakeAdmin(model("a", running=2, active_slices=("cpu0",)), failed, loading) as admin:
        assert run("models", "list", "--url", admin.url) == 0
        table = capsys.readouterr().out
        assert run("models", "list", "--url", admin.url, "--json") == 0
        listed = json.loads(capsys.readouterr().out)
    row = next(line for line in table.splitlines() if "a-alias" in line)
    assert all(text in row for text in ("ready", "2.0 GiB", "4096", "cpu0", "2"))
    assert "failed: tensor [x] missing" in table
    assert "loading 50%" in table
    assert [one["id"] for one in listed] == ["a", "b", "org/c"]
    assert listed[0]["state"] == "ready"


def test_show_by_alias_and_slash(capsys: Any) -> None:
    with FakeAdmin(model("org/a")) as admin:
        assert run("models", "show", "org/a-alias", "--url", admin.url) == 0
        shown = capsys.readouterr().out
        assert "2.0 GiB" in shown
        assert "org/a-alias\n" in shown.replace(" ", "")
        assert run("models", "show", "org/a", "--url", admin.url, "--json") == 0
        assert json.loads(capsys.readouterr().out)["id"] == "org/a"


def test_add_sends_the_catalogues_keys_and_waits(tmp_path: Path, capsys: Any) -> None:
    with FakeAdmin() as admin:
        code = run(
            "models", "add", "new", "--path", str(tmp_path), "--alias", "n", "--alias", "m",
            "--ttft", "0.5", "--pinned", "--max-context", "100", "--url", admin.url,
        )  # fmt: skip
        assert code == 0
        assert admin.find("new").state is ModelState.READY
    assert admin.entries == [
        {
            "id": "new", "path": str(tmp_path), "aliases": ["n", "m"], "ttft_s": 0.5,
            "pinned": True, "max_context": 100,
        }
    ]  # fmt: skip
    assert capsys.readouterr() == ("new: ready, 2.0 GiB of weights\n", "")


def test_add_from_the_hub_without_waiting(capsys: Any) -> None:
    with FakeAdmin(load_s=60) as admin:
        args = ("new", "--hub", "org/new", "--revision", "v1", "--no-wait", "--url", admin.url)
        assert run("models", "add", *args) == 0
    assert admin.entries == [{"id": "new", "hub": "org/new", "revision": "v1"}]
    assert capsys.readouterr().out.startswith("new: cold")


def test_a_model_that_fails_to_load_is_a_failure(capsys: Any) -> None:
    with FakeAdmin() as admin:
        assert run("models", "add", "new", "--path", "/broken", "--url", admin.url) == 1
    assert "c2cserve: new could not be loaded: no tensor" in capsys.readouterr().err


def test_remove_and_reload(capsys: Any) -> None:
    with FakeAdmin(model("org/a"), model("b")) as admin:
        assert run("models", "remove", "org/a", "--url", admin.url) == 0
        assert list(admin.models) == ["b"]
        assert run("models", "reload", "b-alias", "--url", admin.url) == 0
        assert "b" in admin.began
    assert "removed org/a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("remove", "none"), "'none' does not exist"),
        (("show", "none"), "'none' does not exist"),
        (("add", "a", "--hub", "x/y"), "already used"),
    ],
)
def test_the_servers_reason_is_shown(args: tuple[str, ...], says: str, capsys: Any) -> None:
    with FakeAdmin(model("a")) as admin:
        assert run("models", *args, "--url", admin.url) == 1
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


def test_key(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with FakeAdmin(model("a"), key="secret") as admin:
        assert run("models", "list", "--url", admin.url) == 1
        assert "Incorrect admin key" in capsys.readouterr().err
        assert run("models", "list", "--url", admin.url, "--key", "secret") == 0
        monkeypatch.setenv("C2CSERVE_ADMIN_KEY", "secret")
        assert run("top", "--once", "--url", admin.url) == 0


def test_no_server(capsys: Any) -> None:
    for command in (("models", "list"), ("top", "--once")):
        assert run(*command, "--url", "http://127.0.0.1:9") == 1
        err = capsys.readouterr().err
        assert "no server at http://127.0.0.1:9" in err
        assert len(err.splitlines()) == 1


def test_top_begins_with_the_models_that_have_requests(capsys: Any) -> None:
    """A terminal has fewer lines than a catalogue has models."""
    with FakeAdmin(model("a"), model("b", waiting=1), model("c", running=3)) as admin:
        assert run("top", "--once", "--url", admin.url) == 0
    firsts = [line[:4] for line in capsys.readouterr().out.splitlines()]
    assert firsts.index("│ c ") < firsts.index("│ b ") < firsts.index("│ a ")


def test_top_once(capsys: Any) -> None:
    models = (model("a", running=3, active_slices=("cpu0",)), model("b", pinned=True))
    with FakeAdmin(*models) as admin:
        assert run("top", "--once", "--url", admin.url) == 0
    out = capsys.readouterr().out
    assert "pool 4.0 GiB of 16.0 GiB" in out
    assert "slice_lost 2" in out
    assert "rejected_429" not in out, "what never happened is not shown"
    cpu0, cpu1 = (
        next(line for line in out.splitlines() if name in line) for name in ("cpu0", "cpu1")
    )
    rate = float(cpu0.split("│")[11])
    assert rate == pytest.approx(100, rel=0.3), "50 tokens between looks half a second apart"
    assert "50%" in cpu0
    assert "lost" in cpu1
    row = next(line for line in out.splitlines() if line.startswith("│ a "))
    assert "10.0 ms" in row, "TTFT p50"
    assert "95.0%" in row, "SLO attainment"
    assert "b (pinned)" in out


def test_top_shows_the_nodes_of_a_front() -> None:
    def sample(at_s: float, tokens: int) -> Sample:
        one = SliceStatus(
            id="left/cpu0", kind="cpu", state="up", pid=1, cpus=(0,), restarts=0, active_models=(),
            last_model="", kv_total_bytes=0, busy_share=0.0, heartbeat_age_s=0.0,
            output_tokens=tokens,
        )  # fmt: skip
        state = Snapshot(
            "front", 0.0, False, (one,), (), 1 << 30, 4 << 30, 3, 0,
            nodes={"left": "up", "right": "no sign of life for 2 s"},
            node_use={"left": NodeUse(3, 1, 7, 1 << 30, 4 << 30)},
        )  # fmt: skip
        return Sample(at_s, state, Scrape())

    before, now = sample(1.0, 100), sample(2.0, 350)
    for slices in (True, False):
        console = Console(width=200)
        with console.capture() as captured:
            console.print(frame("here", before, before, now, slices=slices))
        shown = captured.get()
        left = next(line for line in shown.splitlines() if line.startswith("│ left "))
        cells = [cell.strip() for cell in left.split("│")[1:-1]]
        assert cells == ["left", "up", "1 of 1", "3", "1", "7", "1.0 GiB", "4.0 GiB", "250"]
        assert "no sign of life for 2 s" in shown
        assert ("left/cpu0" in shown) is slices
