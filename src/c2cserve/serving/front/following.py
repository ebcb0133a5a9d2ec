"""What a front hears of Ray: who is a member, again and again."""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from c2cserve.cluster.link import NodeAddress
from c2cserve.cluster.membership import MemberLine

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""The membership process says something twice a second, or after 5 s if an agent does not answer.
When it is silent for longer, Ray's head is gone or cut off."""


async def follow(
    lines: asyncio.StreamReader, take: Callable[[Mapping[str, NodeAddress]], None],
    silent_s: float = SILENT_S,
) -> bool:  # fmt: skip
    """Hand on who is a member until the lines end. Return whether there were any. Log when they
    stop and when they go on. Raises msgspec.MsgspecError or ValueError for what is no such line."""
    heard, silent = False, False
    while True:
        try:
            line = await asyncio.wait_for(lines.readline(), silent_s)
        except TimeoutError:
            if heard and not silent:
                silent = True
                log.error(
                    "Ray's head has not answered for %g s: serving goes on with known nodes. "
                    "Without it, raylets and nodes end after RAY_gcs_rpc_server_reconnect_timeout_s"
                    " (60 s by default)", silent_s,
                )  # fmt: skip
            continue
        if not line:
            return heard
        if silent:
            log.warning("Ray's head answers again")
            silent = False
        heard = True
        take(msgspec.json.decode(line, type=MemberLine).members)
