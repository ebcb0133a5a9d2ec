"""The benchmark of links' users without a GPU: each part runs, checks bytes and gives ratios."""

import pytest
import transfer_users
import transfers_small
from dry_rig import DryRig
from transfer_users import PARTS, measure
from transfers_run import WrongBytes
from transfers_small import SmallBlocks


def test_every_part_on_links_that_are_a_thread(monkeypatch) -> None:
    for name, value in {
        "_OWN_MIB": (1,), "_OWN_COPIES": 3, "_REPEATS": 1, "_TASKS_MIB": (1, 4), "_DEPTHS": (1, 4),
    }.items():  # fmt: skip
        monkeypatch.setattr(transfer_users, name, value)
    results = measure(DryRig(2, 16 << 20), PARTS)
    rotated = {(row["block"], row["links"]): row for row in results["rotation"]}
    assert rotated.keys() == {(name, n) for name in ("2 MiB", "64 KiB") for n in (1, 2)}
    assert rotated["64 KiB", 1]["blocks_each_way"] == 64
    assert [(row["task_mib"], row["depth"]) for row in results["sweep"]] == [(1, 4), (4, 4), (4, 1)]
    assert [row["mib"] for row in results["priority"]] == [1]
    assert len(results["bars"]) == 2 + 1 + 1
    assert all(bar["value"] > 0 for bar in results["bars"])
    assert min(results["contention"]["gb_per_s_each"]) > 0


def test_one_gpu_has_no_neighbour() -> None:
    assert measure(DryRig(1, 8 << 20), ("sweep", "priority")) == {"bars": []}


def test_small_blocks_by_every_method(monkeypatch) -> None:
    monkeypatch.setattr(transfer_users, "_REPEATS", 1)
    monkeypatch.setattr(transfers_small, "BLOCKS_KIB", (64, 2048))
    monkeypatch.setattr(transfers_small, "CTAS", (1, 4))
    parts = SmallBlocks(DryRig(1, 16 << 20))
    small, duplex = parts.small(), parts.duplex()
    names = [(row["kib"], row["method"].split(" ")[0]) for row in small["rows"]]
    methods = ["calls", "batch", *["kernel"] * 4]
    assert names == [(kib, method) for kib in (64, 2048) for method in methods]
    assert [row["both"] > 0 for row in small["rows"]] == [True] * 12
    assert small["best"].keys() == {64, 2048}
    assert [bar["limit"] for bar in parts.bars] == [0.70, 0.92]
    assert [row["block"] for row in duplex] == ["2 MiB", "64 KiB"] * 3


@pytest.mark.parametrize("gap", [False, True])
def test_bytes_between_blocks_are_compared_too(*, gap: bool) -> None:
    buffers = DryRig(1, 1 << 20).buffers
    for block in range(0, 1 << 20, 2 << 10):
        for target, source in (
            (buffers.gpu[0], buffers.host_source), (buffers.host_target, buffers.gpu_source),
        ):  # fmt: skip
            target[block : block + 1024] = source[block : block + 1024]
    buffers.check_blocks(1 << 10, 1 << 20)
    buffers.host_target[1500 if gap else 3] += 1
    with pytest.raises(WrongBytes):
        buffers.check_blocks(1 << 10, 1 << 20)
