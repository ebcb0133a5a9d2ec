"""`c2cserve plan` as a stranger uses it: odd options, a narrow terminal, an interrupt."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_processes import children_of
from rich.console import Console

from c2cserve import __version__
from c2cserve.cli.main import app
from c2cserve.serving.catalog_shapes import find_models
from c2cserve.sim.planning import progress
from c2cserve.sim.planning import show as shown
from c2cserve.sim.planning.plan import Planner
from c2cserve.sim.planning.result import Plan, Wishes
from c2cserve.sim.planning.time_left import Left
from c2cserve.sim.run import Scenario
from c2cserve.sim.workload.build import WorkloadSettings

SHORT = "synthetic:rate=1,duration=5,sources=4,zipf=0,output=5"


def plan(
    catalog: str, hardware: str = "gh200", most: int = 2, wishes: Wishes | None = None
) -> tuple[Scenario, Plan]:
    base = Scenario(hardware, catalog, WorkloadSettings(SHORT), "5,1")
    planner = Planner(base, find_models(catalog), 0.9, lambda what, done, left: None, wishes)
    return base, planner.largest_catalogue(hardware, most)


def said_by(found: Plan) -> str:
    return "\n".join(shown.answer(found, 0.9))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hardware", "nowhere"], "no hardware 'nowhere'"),
        (["--hardware", "gh200,nowhere"], "no hardware 'nowhere'"),
        (["--hardware", "gh200,"], "no hardware ''"),
        (["--hardware", "gh200:mig9"], "no layout 'mig9'"),
        (["--hardware", "gh200", "--policy", "nothing"], "no policy 'nothing'; there are: "),
        (["--hardware", "gh200", "--trace", ""], "no trace ''"),
        (["--hardware", "gh200", "--trace", "/"], "no trace '/'"),
        (["--hardware", "gh200", "--start-s", "99999"], "the trace has no requests in this time"),
        (["--hardware", "gh200", "--catalog", "nothing"], "no model shape 'nothing'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_simulated(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delattr("c2cserve.sim.planning.trials.simulate")
    with pytest.raises(SystemExit) as ended:
        app(["plan", "--catalog", "llama-3.2-1b", *options, "--jobs", "1"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_one_model_is_one_model() -> None:
    _, found = plan("llama-3.2-1b", most=1)
    assert "gh200 serves 1 model with" in said_by(found)
    assert "Larger catalogues were not tried (--most)." in said_by(found)


def test_a_machine_that_cannot_serve_one_model_says_so() -> None:
    base = Scenario("", "", WorkloadSettings(SHORT), "0.0001,0.0001")
    models = find_models("llama-3-70b*16")  # larger than the pool
    planner = Planner(base, models, 0.9, lambda what, done, left: None)
    found = planner.largest_catalogue("gh200:mig7", 16)
    assert found.best is None
    assert "gh200:mig7 does not serve 1 model with 90.0% of requests in time." in said_by(found)


def test_what_cannot_be_tried_besides_is_said() -> None:
    _, found = plan("llama-3.2-1b", "a100x4+xeon6462cx4", 1, Wishes(layouts=True, spare=True))
    assert found.spare is not None
    assert "a100x4+xeon6462cx4 has no other layouts." in said_by(found)
    _, found = plan("llama-3.2-1b", "gh200", 1, Wishes(spare=True))
    assert "With one GPU less (N+1): gh200 has none besides." in said_by(found)


@pytest.mark.parametrize("width", [75, 100, 160])
def test_no_figure_is_left_out_in_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, found = plan("llama-3.2-1b")
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(shown, "console", lambda: terminal)
    shown.show(scenario, found, 0.9)
    text = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for name in ("TPOT p95", "in time", "busy", "pool"):
        assert name in text


def test_lines_tell_of_progress_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    with progress.progress() as notify:
        notify("gh200:mig7, 8 models", 1, Left(3.0, 3.0, 3.0))
        notify("gh200:mig7, 8 models", 2, Left(2.0, 4.0, 8.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "2 simulations, 2 to 8 s left: gh200:mig7, 8 models"


def test_several_processes_find_what_one_does(tmp_path: Path) -> None:
    """Only dates and seconds differ. The reader of stdout may be a pipe."""
    plans: list[dict[str, object]] = []
    for jobs in ("1", "3"):
        out = tmp_path / f"{jobs}.json"
        done = subprocess.run(
            [*COMMAND, "--trace", SHORT, "--slo", "0.2,0.01", "--jobs", jobs, "--json", str(out)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "serves" in done.stdout
        plans.append(json.loads(out.read_text()))
        for changes in ("date", "machine", "parameters"):
            plans[-1].pop(changes)
    assert plans[0] == plans[1]


def test_the_json_says_when_and_of_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("t_s,model\n1,a\n2,b\n3,a\n")
    with pytest.raises(SystemExit, match="0"):
        app([*COMMAND[3:], "--trace", str(trace), "--most", "2", "--jobs", "1", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["date"]
    assert found["version"] == __version__
    assert "commit" in found
    assert found["machine"]["cpu"]
    asked = found["parameters"]
    assert asked["policies"]
    assert (asked["hardware"], asked["trace"], asked["most"]) == ("gh200", "requests.csv", 2)
    assert not {"out", "plots"} & asked.keys()
    assert found["best"]["models"] == 2


def test_an_interrupt_ends_the_plan_and_its_processes_at_once() -> None:
    began = subprocess.Popen(
        [*COMMAND, "--catalog", "llama-3.2-3b*64", "--jobs", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while len(children := children_of(began.pid)) < 2:
            assert began.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)
        began.send_signal(signal.SIGINT)
        _, error = began.communicate(timeout=30)
    finally:
        began.kill()
    assert began.returncode == 130
    assert error == "c2cserve: interrupted\n"
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize("after_s", [0.03, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("command", ["simulate", "plan --jobs 1"])
def test_an_interrupt_at_any_time_is_one_line(command: str, after_s: float) -> None:
    """While it imports, reads the trace or simulates."""
    words = [*command.split(), "--hardware", "gh200", "--catalog", "llama-3.2-3b*64"]
    program = (
        "import sys; from c2cserve.cli.main import app\n"
        f"sys.argv[1:] = {words}\n"
        "print(flush=True); app()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as began:
        assert began.stdout is not None
        assert began.stdout.readline()
        time.sleep(after_s)
        began.send_signal(signal.SIGINT)
        _, error = began.communicate(timeout=30)
    assert (began.returncode, error) == (130, "c2cserve: interrupted\n")


COMMAND = (
    sys.executable, "-m", "c2cserve", "plan", "--hardware", "gh200", "--catalog", "llama-3.1-8b*4",
)  # fmt: skip
