"""One slice as its stream of the record tells it: steps, KV, loads of weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec, name_of
from c2cserve.core.step import SeqStep, Step
from c2cserve.server.dashboard.rates import Rate
from c2cserve.server.dashboard.state import SliceView
from c2cserve.server.dashboard.timelines import Timelines
from c2cserve.server.dashboard.views import link_of


@dataclass(slots=True)
class _Turns:
    """The steps of one action in the order of their turns; none for a step by itself."""

    steps: tuple[Step, ...]
    left: int
    """Steps that have not ended."""
    done: int = 0
    """Turns that were run."""


@dataclass(slots=True)
class _Running:
    """A step that was begun and has not ended."""

    step: Step
    turns: _Turns
    parked_s: float | None = None


class SliceFold:
    """The life of one worker. `timelines` are told when requests begin here."""

    def __init__(self, slice_: Slice, timelines: Timelines) -> None:
        self.slice = slice_
        self._timelines = timelines
        self.specs: dict[str, ModelSpec] = {}
        self._waiting: dict[str, None] = {}
        self._running: dict[str, None] = {}
        self._steps: dict[int, _Running] = {}
        self._models: dict[str, str] = {}
        """Lane -> the model of its last step."""
        self._model = ""
        self._switches = 0
        self._loading: dict[str, None] = {}
        self.resident: dict[str, None] = {}
        """Versions whose weights are here as a whole."""
        self._tables: dict[str, list[int]] = {}
        """Request -> offsets of its KV blocks."""
        self._blocks: Counter[int] = Counter()
        """Offset -> requests that hold the block there: prefixes are shared."""
        self._sizes: dict[int, int] = {}
        """Offset -> bytes of the block there."""
        self._kv_bytes = 0
        self._busy, self._tokens = Rate(), Rate()
        self._streamed, self._loaded = Rate(), Rate()

    # ---- events ---------------------------------------------------------------------------------

    def tick(self, now: float, events: Sequence[object], actions: Sequence[object]) -> None:
        for event in events:
            self._apply(now, event)
        for action in actions:
            self._note(now, action)

    def _apply(self, now: float, event: object) -> None:
        match event:
            case ev.Activated(spec):
                self.specs[spec.id] = spec
            case ev.Deactivated(model):
                self.specs.pop(model, None)
                self._drop_weights(model)
            case ev.Submitted(request):
                self._waiting[request.id] = None
            case ev.Withdrawn(request_id):
                self._leave(request_id)
            case ev.Fetched(model, took_s, refused):
                self._fetched(now, model, took_s, refused)
            case ev.StepParked(step_id) if step_id in self._steps:
                self._steps[step_id].parked_s = now
            case ev.StepDone():
                self._done(now, event)
            case ev.StepFailed(step_id):
                self._ended(step_id, 0)
            case _:
                pass

    def _fetched(self, now: float, model: str, took_s: float, refused: bool) -> None:
        self._loading.pop(model, None)
        spec = self.specs.get(model)
        if refused or spec is None:
            self.resident.pop(model, None)
        else:
            self.resident[model] = None
            self._loaded.add(now, spec.weight_bytes, took_s)

    def _drop_weights(self, model: str) -> None:
        self._loading.pop(model, None)
        self.resident.pop(model, None)

    def _done(self, now: float, done: ev.StepDone) -> None:
        ran = self._ended(done.step_id, done.times)
        self._busy.add(now, done.compute_s, done.compute_s)
        self._streamed.add(now, done.streamed_bytes, done.compute_s)
        self._tokens.add(now, sum(one.drawn for one in done.outcomes), done.compute_s)
        if ran is not None and ran.parked_s is not None:
            for seq in ran.step.seqs:
                self._parked(seq.request_id, now - ran.parked_s - done.compute_s)
        for one in done.outcomes:
            if one.finished or one.failed:
                self._leave(one.request_id)

    def _parked(self, request_id: str, parked_s: float) -> None:
        one = self._timelines.find(request_id)
        if one is not None and one.first_token_s is None:
            one.weights_s = (one.weights_s or 0.0) + max(0.0, parked_s)

    # ---- actions --------------------------------------------------------------------------------

    def _note(self, now: float, action: object) -> None:
        match action:
            case act.RunStep(step, then, order):
                steps = (step, *then)
                for one in steps:
                    self._run(now, one)
                self._begin(steps, order)
            case act.Drop(request_id, True):
                self._clear(request_id)
                if self._running.pop(request_id, request_id) is None:
                    self._waiting[request_id] = None
            case (
                act.Drop(request_id)
                | act.Fail(request_id)
                | act.Return(request_id)
                | act.Truncate(request_id)
            ):
                self._leave(request_id)
            case act.Move(request_id, "out"):
                self._clear(request_id)
            case act.Fetch(model):
                self._loading[model] = None
            case act.Release(model):
                self._drop_weights(model)
            case _:
                pass

    def _run(self, now: float, step: Step) -> None:
        switched = self._models.get(step.lane, step.model) != step.model
        spec = self.specs.get(step.model)
        for seq in step.seqs:
            self._take_blocks(seq, 0 if spec is None else spec.kv_block_bytes)
            if self._waiting.pop(seq.request_id, seq.request_id) is None:
                self._running[seq.request_id] = None
                self._began(now, seq.request_id, switched)

    def _begin(self, steps: Sequence[Step], order: Sequence[int]) -> None:
        """Note the turns of some steps. An order may be cut short: it counts when it is over."""
        turns = _Turns(tuple(steps[number] for number in order), len(steps))
        for one in steps:
            self._steps[one.id] = _Running(one, turns)
        if not order:
            self._count_switch(steps[0])

    def _ended(self, step_id: int, times: int) -> _Running | None:
        """Take out a step that has ended, and count the switches of its order with the last."""
        ran = self._steps.pop(step_id, None)
        if ran is None:
            return None
        turns = ran.turns
        turns.done += times
        turns.left -= 1
        if not turns.left:
            for step in turns.steps[: turns.done]:
                self._count_switch(step)
        return ran

    def _count_switch(self, step: Step) -> None:
        self._switches += self._models.get(step.lane, step.model) != step.model
        self._models[step.lane] = self._model = step.model

    def _began(self, now: float, request_id: str, switched: bool) -> None:
        one = self._timelines.find(request_id)
        if one is not None and one.first_step_s is None:
            one.first_step_s, one.switched = now, switched
            if not switched:
                one.switch_s = 0.0

    # ---- KV -------------------------------------------------------------------------------------

    def _take_blocks(self, seq: SeqStep, block_bytes: int) -> None:
        if seq.fresh:
            self._clear(seq.request_id)
        table = self._tables.setdefault(seq.request_id, [])
        for offset in seq.new_blocks:
            table.append(offset)
            self._blocks[offset] += 1
            if self._blocks[offset] == 1:
                self._sizes[offset] = block_bytes
                self._kv_bytes += block_bytes

    def _clear(self, request_id: str) -> None:
        for offset in self._tables.pop(request_id, ()):
            self._blocks[offset] -= 1
            if not self._blocks[offset]:
                del self._blocks[offset]
                self._kv_bytes -= self._sizes.pop(offset)

    def _leave(self, request_id: str) -> None:
        self._clear(request_id)
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    # ---- to show it -----------------------------------------------------------------------------

    def view(self, now: float, state: str, restarts: int) -> SliceView:
        return SliceView(
            id=self.slice.id, kind=self.slice.kind, state=state, trouble="",
            model=name_of(self._model), active_models=_names(self.specs),
            loading_models=_names(self._loading), resident_models=_names(self.resident),
            running=len(self._running), waiting=len(self._waiting),
            busy_share=min(1.0, self._busy.per_s(now)), kv_used_bytes=self._kv_bytes,
            kv_total_bytes=self.slice.kv_bytes, kv_host_bytes=None, weights_kept_bytes=None,
            weights_lent_bytes=None, output_tokens_per_s=self._tokens.per_s(now),
            streamed_bytes_per_s=self._streamed.per_s(now),
            loaded_bytes_per_s=self._loaded.per_s(now), peer_bytes_per_s=None,
            switches=self._switches, restarts=restarts, link=link_of(self.slice),
        )  # fmt: skip


def _names(versions: dict[str, ModelSpec] | dict[str, None]) -> tuple[str, ...]:
    return tuple(sorted(map(name_of, versions)))
