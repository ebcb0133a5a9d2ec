"""A lack of descriptors passes: what is opened waits for that, and for nothing else."""

import errno
import os
from pathlib import Path

import pytest
from checkpoints import layered, write_file
from readers import eventually

from c2cserve.files import patience
from c2cserve.files.patience import open_patiently
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.pool import Listener, Pool


class Scarce:
    """`os.open` of a process that has no descriptors the first few times."""

    def __init__(self, failures: int, number: int = errno.EMFILE) -> None:
        self.failures = failures
        self._number = number
        self._open = os.open

    def __call__(self, *args: object, **options: object) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._open(*args, **options)  # pyright: ignore[reportArgumentType]


def test_it_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    scarce = Scarce(3)
    os.close(open_patiently(lambda: scarce(os.devnull, os.O_RDONLY)))
    assert len(caplog.records) == 1, "it is said once"


@pytest.mark.parametrize(("number", "calls"), [(errno.ENOENT, 1), (errno.EMFILE, 3)])
def test_not_for_ever_nor_for_another_error(number: int, calls: int) -> None:
    scarce = Scarce(100, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        open_patiently(lambda: scarce(os.devnull, os.O_RDONLY), wait_s=0.09)
    assert 100 - scarce.failures == calls


def test_what_is_given_up_does_not_wait() -> None:
    scarce = Scarce(100)
    with pytest.raises(OSError, match="Too many open files"):
        open_patiently(lambda: scarce(os.devnull, os.O_RDONLY), lambda: True)
    assert scarce.failures == 99


def test_a_load_waits_for_descriptors(
    tmp_path: Path, pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layered(2, (64, 8))
    write_file(tmp_path / "model.safetensors", model.stored)
    sources = open_checkpoint(tmp_path, model.plan)
    loaded: list[str] = []
    failed: list[str] = []
    listener = Listener(
        lambda m: None, lambda m, s, t: loaded.append(m), lambda m, r: failed.append(r)
    )
    pool = Pool("me", pool_dir, 1 << 30, listener)
    try:
        monkeypatch.setattr(patience, "_RETRY_S", 0.01)
        monkeypatch.setattr(os, "open", Scarce(5))
        pool.load("a", model.plan, sources)
        eventually(lambda: bool(loaded or failed), 5)
        assert (loaded, failed) == (["a"], [])
    finally:
        monkeypatch.undo()
        pool.close()
