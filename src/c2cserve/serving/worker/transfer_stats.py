"""What the transfer engine of a GPU's process counts, as rows of the slice's table."""

from collections.abc import Iterable
from dataclasses import replace

from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.transfer.engine import LinkCounts
from c2cserve.transfer.moves import Port


def with_transfers(
    stats: SliceStats, gpu: int, counts: Iterable[tuple[Port, LinkCounts]]
) -> SliceStats:
    """Return the rows with those of the links: `gpu` has the slice, others lend it their links.

    Copies into memory that others lend are in none of the rows.
    """
    links = list(counts)
    relayed = {
        direction: sum(one.relayed_bytes for port, one in links if port.direction == direction)
        for direction in ("in", "out")
    }
    own = {port.direction: one.direct_bytes for port, one in links if port.gpu == gpu}
    peer = sum(
        one.direct_bytes for port, one in links if port.direction == "peer" and port.gpu == gpu
    )
    return replace(
        stats, transfer_in_bytes=own.get("in", 0), transfer_out_bytes=own.get("out", 0),
        transfer_relayed_in_bytes=relayed["in"], transfer_relayed_out_bytes=relayed["out"],
        transfer_peer_bytes=peer,
        transfer_resent_tasks=sum(one.resent for _, one in links),
        transfer_relay_stalls=sum(one.stalls for _, one in links),
        transfer_relay_errors=sum(one.errors for _, one in links),
    )  # fmt: skip
