"""Options that take sizes of memory."""

import importlib

import pytest
import typer

from c2cserve.cli import main
from c2cserve.serving.live_server import LiveSettings
from c2cserve.terminal.sizes import read_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8000000000", 8 * 10**9), ("8GB", 8 * 10**9), ("8g", 8 * 10**9), ("7.5GiB", 15 << 29),
     ("8Gi", 8 << 30), ("512 MiB", 512 << 20), ("1", 1)],
)  # fmt: skip
def test_sizes_have_units(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "8XB", "-1", "0", "-1GB", "0.1", "nan", "inf", "1e400"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write 8000000000, 8GB"):
        read_size(text)


def test_nothing_may_be_a_size() -> None:
    assert read_size("0", least=0) == 0


def test_serve_takes_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[LiveSettings] = []
    module = importlib.import_module("c2cserve.cli.serve")
    monkeypatch.setattr(module, "_serve", lambda _, settings, *__: taken.append(settings))
    sizes = ["--kv-bytes", "64MiB", "--pool-bytes", "1.5GB", "--host-kv-bytes", "0"]
    with pytest.raises(SystemExit) as end:
        main.app(["serve", "--catalog", "c.toml", *sizes])
    assert end.value.code == 0
    [settings] = taken
    assert (settings.wishes.cpu_kv_bytes, settings.pool_bytes) == (64 << 20, 1_500_000_000)
    assert settings.wishes.host_kv_bytes == 0
    assert settings.wishes.gpu_kv_bytes is None
