"""What goes wrong at the start is one clear line, a non-zero status, and leaves nothing behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_process import CATALOG, SPECIALISTS, alive, free_port, run_cli, wait_until


def start(tmp_path: Path, catalog: Path, *args: str, port: int | None = None) -> tuple[int, str]:
    pool = tmp_path / "pool"
    pool.mkdir(exist_ok=True)
    done = run_cli(
        "serve", "--catalog", str(catalog), "--port", str(port or free_port()),
        "--pool-dir", str(pool), "--slices", "1", *args,
    )  # fmt: skip
    assert list(pool.iterdir()) == [], "something was left in shared memory"
    return done.returncode, done.stderr.strip()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "catalog.toml"
    path.write_text(text)
    return path


def test_used_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, message = start(tmp_path, CATALOG, port=port)
    assert code != 0
    assert str(port) in message
    assert "in use" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[models]\nid=1", "catalog.toml"),
        ('[[models]]\nid = "a"\npath = "nowhere"\n', "nowhere"),
        ('[[models]]\nid = "a"\npth = "x"\n', "pth"),
        ("", "no models"),
    ],
)
def test_bad_catalogue(tmp_path: Path, text: str, says: str) -> None:
    code, message = start(tmp_path, write(tmp_path, text))
    assert code != 0
    assert says in message
    assert len(message.splitlines()) == 1, message


@pytest.mark.parametrize("files", [12, 64])
def test_too_few_open_files(tmp_path: Path, files: int) -> None:
    """Fewer than an event loop takes, and fewer than a server with one slice takes."""
    done = subprocess.run(
        ["bash", "-c", f'ulimit -n {files}; exec "$0" "$@"', sys.executable, "-m",
         "c2cserve.cli.main", "serve", "--catalog", str(CATALOG), "--port", "0",
         "--pool-dir", str(tmp_path), "--slices", "1"],
        stderr=subprocess.PIPE, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"{files} open files are allowed" in line
    assert "ulimit -n 65536" in line
    assert not list(tmp_path.iterdir())


def test_missing_catalogue(tmp_path: Path) -> None:
    code, message = start(tmp_path, tmp_path / "none.toml")
    assert code != 0
    assert "none.toml" in message
    assert len(message.splitlines()) == 1


def test_missing_weights_file(tmp_path: Path) -> None:
    shutil.copytree(SPECIALISTS / "sorter-llama", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    code, message = start(tmp_path, write(tmp_path, '[[models]]\nid = "a"\npath = "broken"\n'))
    assert code != 0
    assert "safetensors" in message
    assert len(message.splitlines()) == 1


def test_wrong_tensor_shape(tmp_path: Path) -> None:
    import json

    shutil.copytree(SPECIALISTS / "sorter-llama", tmp_path / "broken")
    config = tmp_path / "broken" / "config.json"
    fields = json.loads(config.read_text())
    fields["intermediate_size"] += 8
    config.write_text(json.dumps(fields))
    code, message = start(tmp_path, write(tmp_path, '[[models]]\nid = "a"\npath = "broken"\n'))
    assert code != 0
    assert "mlp" in message
    assert str(fields["intermediate_size"]) in message
    assert len(message.splitlines()) == 1


def test_pool_too_small_for_a_pinned_model(tmp_path: Path) -> None:
    shutil.copytree(SPECIALISTS / "sorter-llama", tmp_path / "m")
    catalog = write(tmp_path, '[[models]]\nid = "a"\npath = "m"\npinned = true\n')
    code, message = start(tmp_path, catalog, "--pool-bytes", "100000")
    assert code != 0
    assert "pool" in message
    assert "100000" in message.replace(",", "").replace("_", "")
    assert len(message.splitlines()) == 1


def test_a_pool_directory_that_takes_no_files(tmp_path: Path) -> None:
    done = run_cli(
        "serve", "--catalog", str(CATALOG), "--port", str(free_port()), "--pool-dir", "/proc",
        "--slices", "1", "--gpu-slices", "none", timeout_s=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--pool-dir /proc: No such file" in done.stderr


@contextmanager
def waiting_for_a_hub(tmp_path: Path, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A start that waits for a hub which takes its connection and never answers."""
    catalog = write(tmp_path, '[[models]]\nid = "a"\nhub = "some/model"\n')
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(100)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}
        (tmp_path / "pool").mkdir()
        with subprocess.Popen(
            [
                # Whatever started the tests may ignore signals (`&` in a script, nohup).
                "env", "--default-signal=INT,HUP",
                sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog", str(catalog),
                "--port", str(free_port()), "--pool-dir", str(tmp_path / "pool"), "--slices", "1",
                "--gpu-slices", "none", *args,
            ],
            env={**os.environ, **variables}, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                connection, _ = hub.accept()
                with connection:
                    yield process
            finally:
                process.kill()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)]
)
def test_a_signal_ends_a_start_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with waiting_for_a_hub(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(100) == status
        assert process.stderr is not None
        said = process.stderr.read()
        assert b"Traceback" not in said
        assert (b"\nc2cserve: interrupted\n" in b"\n" + said) == (status == 130)
    assert list((tmp_path / "pool").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [(signal.SIGTERM, 0, b""), (signal.SIGHUP, 0, b""),
     (signal.SIGINT, 130, b"c2cserve: interrupted\n")],
)  # fmt: skip
def test_a_signal_ends_the_imports_of_a_start(
    tmp_path: Path, number: signal.Signals, status: int, says: bytes
) -> None:
    """A start has children before it has imported anything, and it ends them."""
    with subprocess.Popen(
        ["env", "--default-signal=INT,HUP", sys.executable, "-m", "c2cserve", "serve",
         "--catalog", str(CATALOG), "--port", "0", "--pool-dir", str(tmp_path)],
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(children.read_text, 60, "children", 0.001)
        started = [int(pid) for pid in children.read_text().split()]
        process.send_signal(number)
        assert process.wait(100) == status
        assert not any(alive(pid) for pid in started)
        assert process.stderr is not None
        assert process.stderr.read() == says
    assert list(tmp_path.iterdir()) == []


def test_a_reload_that_is_asked_for_during_the_start_does_not_end_it(tmp_path: Path) -> None:
    with waiting_for_a_hub(tmp_path, "--usage-log", str(tmp_path / "usage")) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0, "SIGHUP ended it"
