"""The benchmark beside MMA's figures, without a GPU: each part runs and gives rates."""

import pytest
import transfer_users
import transfers_published
from dry_rig import DryRig
from transfers_published import PARTS, measure


def test_every_part_on_links_that_are_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_SIZES_MIB": (1, 16, 512), "_REPEATS": 1, "_PLAIN_BYTES": 1 << 20, "_AWHILE_S": 0.01,
        "_CHUNKED_BYTES": 8 << 20, "_ONE_PATH": 2 << 20,
    }.items():  # fmt: skip
        monkeypatch.setattr(transfers_published, name, value)
    for name, value in {"_REPEATS": 1, "_TASKS_MIB": (1, 4), "_DEPTHS": (1, 4)}.items():
        monkeypatch.setattr(transfer_users, name, value)
    results = measure(lambda size: DryRig(2, size), 16 << 20, PARTS)
    sizes = {(row["mib"], row["what"]) for row in results["sizes"]}
    assert sizes == {(mib, way) for mib in (1, 16) for way in ("in", "out")}
    assert [row["links"] for row in results["paths"]] == [1, 1, 2, 2]
    beside = results["beside"]["plain"]  # plain copies may end in no short time
    assert min(beside["engine_gb_per_s"], beside["engine_alone_gb_per_s"]) > 0
    assert min(beside.values()) >= 0
    assert min(results["beside"]["engines"]["gb_per_s_each"]) > 0
    balance = {(row["way"], row["beside"]) for row in results["balance"]}
    assert balance == {
        (way, beside)
        for way in ("one copy", "1:1", "1:2", "ours")
        for beside in ("nothing", "plain copies")
    }
    assert [row["order"] for row in results["peer"]] == ["none", "direct", "longest"]
    assert [(row["task_mib"], row["depth"]) for row in results["chunks"]] == [
        (1, 4),
        (4, 4),
        (4, 1),
    ]


def test_one_gpu_has_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_published, "_SIZES_MIB", (1,))
    monkeypatch.setattr(transfers_published, "_REPEATS", 1)
    assert measure(lambda size: DryRig(1, size), 4 << 20, PARTS).keys() == {"sizes"}
