"""The benchmark of links' users without a GPU: each part runs, checks bytes and gives ratios."""

import transfer_users
from dry_rig import DryRig
from transfer_users import PARTS, measure


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
    assert results["small"]["to_plain"] > 0
    assert [row["mib"] for row in results["priority"]] == [1]
    assert len(results["bars"]) == 2 + 1 + 1
    assert all(bar["value"] > 0 for bar in results["bars"])
    assert min(results["contention"]["gb_per_s_each"]) > 0


def test_one_gpu_has_no_neighbour() -> None:
    assert measure(DryRig(1, 8 << 20), ("sweep", "priority")) == {"bars": []}
