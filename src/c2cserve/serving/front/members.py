"""`c2cserve members`: tells a front who is in its cluster. The front starts it."""

import signal
import sys

import msgspec

from c2cserve.cluster.membership import (
    LOCAL,
    MemberOrder,
    Membership,
    NoCluster,
    agents_of,
    join,
    stop_agents,
)
from c2cserve.processes.own_stdout import own_stdout
from c2cserve.processes.parent_death import end_with, kill_descendants_at_exit
from c2cserve.serving.front.server import NO_CLUSTER
from c2cserve.serving.logs import setup_logging
from c2cserve.terminal.output import CliError


def members() -> None:
    """Follow a Ray cluster for a front."""
    # A terminal sends it to the front too, which ends this process when it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    said = own_stdout()
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=MemberOrder)
    end_with(order.parent)
    setup_logging("members", "info", "text")
    if order.address == LOCAL:
        # At exit Ray ends what it has started, but not what that was just starting itself.
        kill_descendants_at_exit()
    try:
        ray = join(order.address)
    except NoCluster as error:
        raise CliError(str(error), NO_CLUSTER) from error
    signal.signal(signal.SIGTERM, _exit)  # again: Ray's own handler prints a trace
    try:
        Membership(ray, bytes(order.spec)).run(said)
    finally:
        if order.address == LOCAL:
            stop_agents(ray, agents_of(ray))


def _exit(signum: int, frame: object) -> None:
    """Exit by an exception, so that what is to be done at exit is done."""
    sys.exit()
