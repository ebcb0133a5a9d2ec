"""The end of a controller, as the requests see it that it has not taken yet."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job, Request, Sampling
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.runtime.ports import no_record
from c2cserve.serving.controller.fleet import Fleet, FleetDown, FleetSettings
from c2cserve.serving.controller.gateway import LiveGateway
from c2cserve.serving.controller.host import HostedModel, ModelHost


class Down:
    """A fleet that ends the controller when it is next asked for workers, and may be waited for."""

    slots: dict[str, Any] = {}  # noqa: RUF012 - it has none
    settings = FleetSettings()

    def __init__(self) -> None:
        self.asked, self.ends = threading.Event(), threading.Event()

    def reap(self, now: float) -> Sequence[Any]:
        self.asked.set()
        self.ends.wait()
        raise FleetDown("no worker starts")

    def outage(self, now: float) -> None:
        return None

    def close(self, grace_s: float) -> None: ...


def test_a_request_that_the_controller_never_took_is_refused() -> None:
    async def run() -> str:
        fleet, ended = Down(), asyncio.get_running_loop().create_future()
        policy: Any = SimpleNamespace(done=False, wakeup=None)
        gateway = LiveGateway(
            "i", lambda _: (policy, no_record), cast(Fleet, fleet), cast(ModelHost, None),
            ended.set_result,
        )  # fmt: skip
        files = ModelFiles("m", "", 64, 64, (), 1.0, 1.0, 0, "m")
        gateway.add_hosted(HostedModel(ModelSpec("m", 1, 1, 1, 64), files, (), {}, "float32", {}))
        gateway.start()
        await asyncio.to_thread(fleet.asked.wait)
        job = Job(Request("r", "m", 1, 1, 0.0), (1,), Sampling(seed=0))
        async with aclosing(gateway.submit([job])) as deltas:
            answer = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0)
            fleet.ends.set()
            with pytest.raises(Refused) as refused:
                await asyncio.wait_for(answer, 20.0)
        assert await ended == refused.value.reason
        gateway.join()
        return refused.value.reason

    assert asyncio.run(run()) == "no worker starts"
