"""The rows about transfers in a slice's table."""

from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.worker.transfer_stats import with_transfers
from c2cserve.transfer.engine import LinkCounts
from c2cserve.transfer.moves import Port


def counts(direct: int, relayed: int = 0, resent: int = 0) -> LinkCounts:
    return LinkCounts(direct, relayed, 1, resent, stalls=resent, errors=0)


def test_links_of_the_slice_and_of_neighbours_are_rows_of_their_own() -> None:
    links = [
        (Port(2, "in"), counts(100)), (Port(2, "out"), counts(30)),
        (Port(2, "peer", 3), counts(7)), (Port(3, "in"), counts(1000, 50, 2)),
        (Port(3, "out"), counts(0, 5)), (Port(3, "peer", 2), counts(9)),
    ]  # fmt: skip
    stats = with_transfers(SliceStats(steps=4), 2, links)
    assert stats == SliceStats(
        steps=4, transfer_in_bytes=100, transfer_out_bytes=30, transfer_relayed_in_bytes=50,
        transfer_relayed_out_bytes=5, transfer_peer_bytes=7, transfer_resent_tasks=2,
        transfer_relay_stalls=2,
    )  # fmt: skip
