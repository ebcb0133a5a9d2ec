"""Makes the controller fail, in every server process that has this folder on its PYTHONPATH.

Faults are names of files in $C2CSERVE_TEST_FAULTS. `decide`: the policy's next decision raises, and
takes the file away; `decides`: every one does. While they are there: `encode-N`: a request whose
prompt has token N cannot be encoded; `receive-N`: the tokens of such a request cannot be handled;
`arrive-N`: the policy cannot be told of a request for N tokens.
"""

import os
import sys
from pathlib import Path
from typing import Any

from after_import import after_import

_FOLDER = Path(os.environ["C2CSERVE_TEST_FAULTS"])
_SERVER = "c2cserve.serving.live_server"


def _faults(kind: str) -> list[int]:
    """What the faults of this kind are of."""
    names = [path.name.partition("-") for path in _FOLDER.iterdir()]
    return [int(of) for name, _, of in names if name == kind]


def _break(modules: dict[str, Any]) -> None:
    workers = modules["c2cserve.serving.controller.workers"]
    table = modules["c2cserve.serving.controller.jobs"].JobTable
    policy = modules["c2cserve.policy.cluster.policy"].ClusterPolicy
    encode, receive = workers.encode, table.receive
    apply, decide = policy.apply, policy.decide

    def failing_encode(message: Any) -> bytes:
        job = getattr(message, "job", None)
        if job is not None and any(token in job.tokens for token in _faults("encode")):
            raise OverflowError("an injected fault: encode")
        return encode(message)

    def failing_receive(self: Any, delta: Any, now: float) -> Any:
        live = self.get(delta.request_id)
        if live is not None and any(token in live.job.tokens for token in _faults("receive")):
            raise ValueError("an injected fault: receive")
        return receive(self, delta, now)

    def failing_apply(self: Any, event: Any) -> None:
        requests = [getattr(event, "request", None), *getattr(event, "displaced", ())]
        for request in filter(None, requests):
            if request.max_new_tokens in _faults("arrive"):
                raise ZeroDivisionError("an injected fault: arrive")
        apply(self, event)

    def failing_decide(self: Any, now: float) -> Any:
        if (_FOLDER / "decides").exists():
            raise KeyError("an injected fault: decides")
        if (_FOLDER / "decide").exists():
            (_FOLDER / "decide").unlink()
            raise KeyError("an injected fault: decide")
        return decide(self, now)

    workers.encode, table.receive = failing_encode, failing_receive
    policy.apply, policy.decide = failing_apply, failing_decide


# Only a server ever loads this module; it is the last of those that are changed.
after_import(_SERVER, lambda _: _break(sys.modules))
