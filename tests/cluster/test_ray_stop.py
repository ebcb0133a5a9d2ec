"""What is left in shared memory when nodes are stopped, on real Ray."""

from pathlib import Path

import pytest
from ray_cluster import Front, Machines
from server_process import run_cli, wait_until

pytestmark = pytest.mark.slow


def test_a_stop_leaves_nothing_in_the_pools(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with Machines(1) as machines, Front(machines.address, directory=pool) as front:
        front.wait_nodes(1)
        wait_until(lambda: len(list(pool.glob("*.ctl"))) >= 4, 60, "models are in the pools")
        done = run_cli("cluster", "stop", "--address", machines.address)
        assert (done.returncode, done.stdout.strip()) == (0, "1 node stopped")
        # The front lives: its vocabularies and its lock are its own.
        [lock] = pool.glob("*.lock")
        assert all(path.name.startswith(lock.stem) for path in pool.iterdir())


def test_the_end_of_a_front_with_a_ray_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with Front("local", directory=pool) as front:
        front.wait_nodes(1)
        wait_until(lambda: len(list(pool.glob("*.ctl"))) >= 4, 60, "models are in the pool")
    assert not list(pool.iterdir())
    assert "SIGTERM received" not in front.log.read_text(), "no trace of Ray's for an end as asked"
