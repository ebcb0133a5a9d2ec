"""Whose fault a failed step is: one request's, its model's, or the slice's. Ours.

step fails --> each of its requests again, alone --> fails again: that request is at fault
                                                 `-> works: it goes on, soon in company
3 requests of a model at fault in a row, none in between that works --> the model is given up
"""

from dataclasses import dataclass

from c2cserve.core.actions import GiveUp, Recover
from c2cserve.policy.headroom import due_s
from c2cserve.policy.slice.batching import ActiveModel, Line, Seq

_ALONE_TOKENS = 4
"""Tokens that a request draws alone after a failed step. Its prompt draws the first one; a decode
step that is met for the third time runs as it will from then on (`engine.gpu.graphs`)."""
_ALONE_GROWTH = 16
"""How many times longer it stays alone after each further failure in company."""
_GIVE_UP = 3
"""Requests at fault in a row."""


@dataclass(slots=True)
class _Row:
    """Failures of a model in a row."""

    requests: int = 0
    given_up: bool = False
    others_work: bool = False


class Faults:
    """The faults of one slice. Nothing is kept while all models work."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def at_fault(self, model: str, reason: str) -> GiveUp | None:
        """A request failed alone. Not None: so does every other one of its model. (A model that
        was given up is so again with its next failure.)"""
        row = self._rows.setdefault(model, _Row())
        row.requests += 1
        if row.requests < _GIVE_UP:
            return None
        row.given_up = True
        return GiveUp(model, reason, row.others_work)

    def landed(self, seq: Seq) -> Recover | None:
        """A step of the request is done. Its model works if the request has ended as it should, or
        has gone on for a while. A first token proves nothing: decodes may still fail."""
        gone_on = not seq.suspect and seq.length - seq.request.prompt_len >= _ALONE_TOKENS
        if not (seq.ended or gone_on):
            return None
        model = seq.model.name
        row = self._rows.pop(model, None)
        for other in self._rows.values():
            other.others_work = True
        return Recover(model) if row is not None and row.given_up else None


def set_apart(seq: Seq) -> None:
    """Have a request run alone for a while, because a step that it had a part in failed."""
    request = seq.request
    tokens_out = request.sent + seq.length - request.prompt_len
    seq.due_s = due_s(request, tokens_out) + seq.excused_s
    seq.failures += 1
    seq.alone_until = seq.length + _ALONE_TOKENS * _ALONE_GROWTH ** (seq.failures - 1)
    seq.model.suspects = True


def groups(model: ActiveModel, line: Line) -> list[Line]:
    """Return the groups of requests that may share a step, the most urgent group first. A suspect
    is alone."""
    if not model.suspects:
        return [line]
    model.suspects = any(seq.suspect for seq in model.seqs.values())
    company: Line = ([], [])
    found = [company]
    for kind, seqs in enumerate(line):
        for seq in seqs:
            if seq.suspect:
                found.append(([], [seq]) if kind else ([seq], []))
            else:
                company[kind].append(seq)
    everybody = [group for group in found if group[0] or group[1]]
    return sorted(everybody, key=lambda group: min(map(model.rank, group[0] + group[1])))
