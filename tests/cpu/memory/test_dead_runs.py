"""What a killed server leaves in shared memory is removed by the next, and nothing else is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import layered, write_file
from readers import eventually

from c2cserve.memory.pool import Listener, Pool, PoolError
from c2cserve.processes.instances import remove_dead_runs, remove_instance

OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from checkpoints import layered
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.pool import Listener, Pool
directory, disk = Path(sys.argv[1]), Path(sys.argv[2])
plan = layered(3, (64, 8)).plan
def say(*words): print(*words, flush=True)
slow = lambda fd, buffer, offset: time.sleep(60)
listener = Listener(lambda model: None, lambda model, size, took: say("loaded", model), say)
whole = Pool("dead-whole", directory, 1 << 30, listener)
whole.load("a", plan, open_checkpoint(disk, plan))
middle = Pool("dead-middle", directory, 1 << 30, listener, read=slow)
middle.load("b", plan, open_checkpoint(disk, plan))
while not list(directory.glob("*middle.b.*")): time.sleep(0.01)
time.sleep(60)
"""

QUIET = Listener(lambda model: None, lambda model, size, took_s: None, lambda model, reason: None)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_killed_owners_segments_are_removed_by_the_next(pool_dir: Path, tmp_path: Path) -> None:
    """kill -9 with one model loaded and one half-way; a living run beside it keeps its files."""
    write_file(tmp_path / "model.safetensors", layered(3, (64, 8)).stored)
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(pool_dir), str(tmp_path), here],
        stdout=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        assert owner.stdout.readline().strip() == "loaded a"
        eventually(lambda: any(".b." in name for name in files(pool_dir)))
        before = files(pool_dir)
        assert remove_dead_runs(pool_dir) == []
        assert files(pool_dir) == before, "a living run's files stay"
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    assert files(pool_dir) == before, "nobody could clean up"
    living = Pool("living", pool_dir, 1 << 20, QUIET)
    assert sorted(remove_dead_runs(pool_dir)) == ["dead-middle", "dead-whole"]
    assert files(pool_dir) == ["c2cserve.living.lock"]
    living.close()
    assert files(pool_dir) == []


def test_an_instance_is_owned_by_one_pool(pool_dir: Path) -> None:
    first = Pool("one", pool_dir, 1 << 20, QUIET)
    with pytest.raises(PoolError, match="another run has the instance one"):
        Pool("one", pool_dir, 1 << 20, QUIET)
    first.close()
    Pool("one", pool_dir, 1 << 20, QUIET).close()


def test_foreign_files_are_let_be(pool_dir: Path) -> None:
    foreign = ["c2cserve.lock", "c2cserve", "other.x.lock", "psm_1234", "c2cserve-notes.lock"]
    for name in foreign:
        (pool_dir / name).write_text("mine")
    pool = Pool("me", pool_dir, 1 << 20, QUIET)
    (pool_dir / "c2cserve.me.cpu0.1.sock").write_text("")  # a worker's, under the same name
    assert remove_dead_runs(pool_dir) == []
    pool.close()
    assert files(pool_dir) == sorted(foreign)


def test_removing_an_instance_does_not_touch_one_with_a_longer_name(pool_dir: Path) -> None:
    for name in ("c2cserve.ab.m.1", "c2cserve.abc.m.1", "c2cserve.ab.lock", "c2cserve.abc.lock"):
        (pool_dir / name).write_text("")
    remove_instance(pool_dir, "ab")
    assert files(pool_dir) == ["c2cserve.abc.lock", "c2cserve.abc.m.1"]


def test_cleaning_an_empty_directory(tmp_path: Path) -> None:
    assert remove_dead_runs(tmp_path) == []


def test_the_lock_goes_with_its_process_only(pool_dir: Path) -> None:
    """Children that a server starts do not keep its lock alive."""
    pool = Pool("parent", pool_dir, 1 << 20, QUIET)
    with subprocess.Popen(["sleep", "30"]) as child:
        held = [
            os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")
        ]
        child.kill()
    assert not any(path.startswith(str(pool_dir)) for path in held)
    pool.close()


def test_the_name_of_a_lock_is_no_pattern(pool_dir: Path) -> None:
    living = Pool("living", pool_dir, 1 << 20, QUIET)
    (pool_dir / "c2cserve.*.lock").touch()
    assert remove_dead_runs(pool_dir) == ["*"]
    assert files(pool_dir) == ["c2cserve.living.lock"]
    living.close()


def test_locks_of_other_users_are_left_alone(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names could say that the files of a living run are to be removed."""
    theirs = ["c2cserve.living.model.lock", "c2cserve.living.model.1"]
    for name in theirs:
        (pool_dir / name).touch(0o666)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert remove_dead_runs(pool_dir) == []
    assert files(pool_dir) == sorted(theirs)


def test_what_is_no_lock_is_left_alone(pool_dir: Path) -> None:
    (pool_dir / "c2cserve.folder.lock").mkdir()
    (pool_dir / "c2cserve.link.lock").symlink_to("c2cserve.link.lock")
    os.mkfifo(pool_dir / "c2cserve.pipe.lock", 0o444)
    before = files(pool_dir)
    assert remove_dead_runs(pool_dir) in ([], ["pipe"])
    assert set(before) - set(files(pool_dir)) <= {"c2cserve.pipe.lock"}
