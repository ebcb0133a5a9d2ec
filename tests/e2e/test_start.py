"""What goes wrong at the start is one clear line, a non-zero status, and leaves nothing behind."""

import shutil
import socket
from pathlib import Path

import pytest
from server_process import CATALOG, SPECIALISTS, free_port, run_cli


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
