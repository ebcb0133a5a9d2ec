"""The simulated machine: `policy.cluster` and one `policy.slice` for each slice, off one clock."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.request import Request
from c2cserve.policy.baselines.presets import C2CSERVE, Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.slice.strategies import live_steps_in_flight
from c2cserve.runtime.ports import Executor
from c2cserve.sim.policies.build import cluster_policy, slice_policy
from c2cserve.sim.policies.profiled import profiled
from c2cserve.sim.recording import Recorders, no_recorders
from c2cserve.sim.stuck import Stuck
from c2cserve.sim.world.context import Controller, SimulationContext
from c2cserve.sim.world.costs import Costs
from c2cserve.sim.world.faults import Fault
from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice
from c2cserve.sim.world.links import Network
from c2cserve.sim.world.loop import LoopScheduler, PolicyLoop
from c2cserve.sim.world.requests import Ending, RequestBook, SimRequest, SloRule, TrackedRequest
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.slice_simulation import SliceSimulation
from c2cserve.sim.world.timeline import Timeline

_KV_RESIZE_BYTES_PER_S = 40e9
"""Speed of resizing KV memory that is sized in advance and in use, in bytes of its new size.
SLINFER's figure 17 has 0.3 s for 16 GB and 1.9 s for 64 GB, with a copy of its content. Memory
without content is allocated, which takes no time here."""


@dataclass(frozen=True, slots=True)
class Settings:
    preset: Preset = C2CSERVE
    admission: AdmissionSettings = AdmissionSettings(max_waiting=1_000_000)
    seed: int = 0
    noise: float = 0.0
    """Standard deviation of the logarithm of step times."""
    cold_pool: bool = False
    """Models come from disk once the first request has arrived. Else as many as fit are in the pool
    before."""
    faults: tuple[Fault, ...] = ()
    lookahead: int = 64
    """Decode steps that slices may decide at once (`sim.policies.lookahead`); 1: none, as
    live."""
    as_live: bool = False
    """Slices are as a server's. GPU slices have two steps in flight, and each step is a decision of
    its own. The controller learns step times from slices; else it knows them in advance."""
    hybrid: bool = False
    """GEMMs are C2CServe's hybrid ones instead of ours (`sim.world.costs`)."""


class Simulation(Executor[act.ClusterAction | act.BaselineClusterAction], Controller):
    """The executor of the controller's policy, and all around it."""

    def __init__(
        self,
        machine: SimMachine,
        models: Sequence[SimModel],
        requests: Iterable[SimRequest],
        slo: SloRule | None,
        settings: Settings,
        recorders: Recorders = no_recorders,
    ) -> None:
        """Set up a simulation.

        `requests` come in order of arrival, and are read as time passes. If `slo` is None, each
        model's own targets hold."""
        self.machine = machine
        self.settings = settings
        self.models = {model.spec.id: model for model in models}
        self.timeline = Timeline()
        self.loops = LoopScheduler(self.timeline)
        self.network = Network(self.timeline, machine.links)
        self.requests = RequestBook()
        self._simulated = {simulated.slice.id: simulated for simulated in machine.slices}
        self.slices: dict[str, SliceSimulation] = {}
        self.lost: list[SliceSimulation] = []
        """Lost slices, whose counters still count."""
        self.started_s = 0.0
        self.arrived = 0
        self._slo = slo
        self._recorders = recorders
        self._arrivals: Iterator[SimRequest] = iter(requests)
        self._pooled: dict[str, int] = {}
        """Model -> number of its latest load."""
        self._loads = 0
        self._recalled: set[str] = set()
        policy = cluster_policy(settings.admission, settings.preset)
        self.loop: PolicyLoop[ev.ClusterEvent, act.ClusterAction | act.BaselineClusterAction] = (
            PolicyLoop(policy, self, recorders(None))
        )
        if settings.preset.placing == "slinfer":
            self.loop.observe = self._tokens_sent
        self._context = SimulationContext(
            self.timeline, self.loops, self.network, Costs(machine.hardware.tables), self.models,
            self, Random(settings.seed), settings.noise,
            settings.preset.hybrid_alpha or 0.0 if settings.hybrid else None,
        )  # fmt: skip

    @property
    def slice_ids(self) -> Collection[str]:
        return self._simulated.keys()

    def run(self) -> None:
        """Run until every request has ended. Raises Stuck."""
        for event in self._opening():
            self.notify(event)
        for simulated in self.machine.slices:
            self._up(simulated)
        self.loops.run_due()
        for fault in self.settings.faults:
            fault.schedule(self)
        self._next_request()
        # A request may be refused while its last step runs: slices end that step, too.
        while self.requests.live or self._more or any(one.seqs for one in self.slices.values()):
            if not self.timeline.step():
                raise Stuck(f"{len(self.requests.live)} requests are left")
            self.loops.run_due()
        for one in self.slices.values():
            one.update_use()
        self.network.update_totals()

    def _opening(self) -> Iterator[ev.ClusterEvent]:
        yield ev.PoolState(self.machine.hardware.pool_bytes)
        for model in self.models.values():
            yield ev.ModelAdded(model.spec)
        if not self.settings.as_live:
            yield from profiled(self.machine, list(self.models.values()))

    # ---- arrivals -------------------------------------------------------------------------------

    _more = True

    def _next_request(self) -> None:
        coming = next(self._arrivals, None)
        if coming is None:
            self._more = False
        else:
            self.timeline.at(coming.arrival_s, self._arrive, coming)

    def _arrive(self, coming: SimRequest) -> None:
        spec = self.models[coming.model].spec
        output = min(coming.output, spec.max_context - 1)
        prompt = min(coming.prompt, spec.max_context - output)
        request = Request(
            id=f"r{self.arrived}",
            model=coming.model,
            prompt_len=prompt,
            max_new_tokens=spec.max_context - prompt,
            arrival_s=self.timeline.now,
            slo=spec.slo if self._slo is None else self._slo(prompt),
            prefix_hashes=coming.prefix_hashes,
            tenant=coming.tenant,
            group=coming.group,
        )
        self.arrived += 1
        self.requests.add(TrackedRequest(request, output))
        later_s = self.machine.hardware.request_s
        if later_s:
            self.timeline.at(self.timeline.now + later_s, self.notify, ev.Arrived(request))
        else:
            self.notify(ev.Arrived(request))
        self._next_request()

    # ---- what slices report to the controller ---------------------------------------------------

    def notify(self, event: ev.ClusterEvent) -> None:
        self.loops.notify(self.loop, event)

    def _tokens_sent(self) -> Sequence[ev.ClusterEvent]:
        sent = [row for one in self.slices.values() for row in one.tokens_sent()]
        return [ev.TokensSent(tuple(sent))] if sent else []

    def finished(self, tracked: TrackedRequest) -> None:
        self._end(tracked, "finished")

    def truncated(self, tracked: TrackedRequest) -> None:
        self._end(tracked, "truncated")

    def dropped(self, tracked: TrackedRequest) -> None:
        """Its slice has removed a withdrawn request."""
        name = tracked.request.id
        if name in self._recalled:
            self._recalled.remove(name)
            tracked.slice_id = ""
            self.notify(ev.Recalled(tracked.as_of_now()))

    def returned(self, tracked: TrackedRequest) -> None:
        """Its slice has given back a request that had not begun."""
        tracked.slice_id = ""
        tracked.resumed = True
        self.notify(ev.Recalled(tracked.as_of_now()))

    def _end(self, tracked: TrackedRequest, ending: Ending) -> None:
        self._recalled.discard(tracked.request.id)
        self.requests.end(tracked, ending)
        self.notify(ev.Finished(tracked.request.id, tracked.sampled, ending == "failed"))

    # ---- Executor -------------------------------------------------------------------------------

    def submit(self, action: act.ClusterAction | act.BaselineClusterAction) -> None:
        if isinstance(action, act.Dispatch):  # `match` looks names up; most actions are this one
            tracked = self.requests.live[action.request_id]
            assert not tracked.slice_id, f"{action.request_id} is dispatched twice"
            tracked.slice_id = action.slice_id
            tracked.dispatched_s = self.timeline.now
            self.slices[action.slice_id].submit_request(tracked)
            return
        match action:
            case act.Reject(request_id, status):
                tracked = self.requests.live[request_id]
                assert status != 429 or not tracked.resumed, f"{request_id} had tokens, then 429"
                self.requests.end(tracked, "rejected", status)
            case act.Activate(model, slice_id, keep):
                assert model in self._pooled, f"{model} is not in the pool"
                self.slices[slice_id].activate(self.models[model], keep=keep)
            case act.Deactivate(model, slice_id):
                self.slices[slice_id].deactivate(model)
            case act.Withdraw(request_id, slice_id):
                self.slices[slice_id].withdraw(request_id)
            case act.Recall(request_id, slice_id):
                self.slices[slice_id].recall(request_id)
            case act.Preempt(request_id, slice_id):
                self._recalled.add(request_id)
                self.slices[slice_id].withdraw(request_id)
            case act.ResizeKv(model, slice_id, kv_bytes):
                self._resize(model, slice_id, kv_bytes)
            case act.Load(model):
                self._load(self.models[model])
            case act.Evict(model) | act.Forget(model):
                self._pooled.pop(model, None)
                for one in self.slices.values():
                    one.forget(model)
            case act.Backlog():
                pass  # no simulated request is inspected before it arrives
            case act.Replace():
                raise TypeError(f"no simulated slice fails: {action}")

    # ---- the pool -------------------------------------------------------------------------------

    def _load(self, model: SimModel) -> None:
        name, size = model.spec.id, model.spec.weight_bytes
        self._loads += 1
        self._pooled[name] = self._loads
        used = sum(self.models[other].spec.weight_bytes for other in self._pooled)
        assert used <= self.machine.hardware.pool_bytes, "the pool is over its budget"
        warm = not self.arrived and not self.settings.cold_pool
        took_s = 0.0 if warm else size / self.machine.hardware.disk_bytes_per_s
        if took_s:
            self.timeline.at(self.timeline.now + took_s, self._loaded, name, self._loads, took_s)
        else:
            self._loaded(name, self._loads, 0.0)

    def _loaded(self, name: str, number: int, took_s: float) -> None:
        if self._pooled.get(name) == number:
            self.notify(ev.ModelUsable(name))
            self.notify(ev.ModelLoaded(name, self.models[name].spec.weight_bytes, took_s))

    # ---- memory sized in advance ----------------------------------------------------------------

    def _resize(self, model: str, slice_id: str, kv_bytes: int) -> None:
        """Resize KV memory. Meanwhile an instance with KV computes nothing, because that moves."""
        here = self.slices[slice_id]
        if not here.holds_kv(model):
            self.notify(ev.KvResized(model, slice_id, kv_bytes))
            return
        here.pause(model)
        took_s = kv_bytes / _KV_RESIZE_BYTES_PER_S
        self.timeline.at(self.timeline.now + took_s, self._resized, here, model, kv_bytes)

    def _resized(self, here: SliceSimulation, model: str, kv_bytes: int) -> None:
        here.resume(model)
        if self.slices.get(here.simulated.slice.id) is here:
            self.notify(ev.KvResized(model, here.simulated.slice.id, kv_bytes))

    # ---- slices come and go ---------------------------------------------------------------------

    def _up(self, simulated: SimulatedSlice) -> None:
        preset, live = self.settings.preset, self.settings.as_live
        lookahead = 1 if live else self.settings.lookahead
        in_flight = live_steps_in_flight(simulated.slice) if live else 1
        hybrid = self.settings.hybrid
        policy = slice_policy(simulated.slice, preset, lookahead, in_flight, hybrid=hybrid)
        self.slices[simulated.slice.id] = SliceSimulation(
            simulated, self._context, policy, self._recorders(simulated.slice),
            chained=in_flight > 1, reports=live,
        )  # fmt: skip
        self.notify(ev.SliceUp(simulated.slice))

    def lose_slice(self, slice_id: str, back_s: float) -> None:
        """Lose a slice for `back_s` seconds. Its requests go on elsewhere from what clients have.
        Those that were refused while a step of them ran have ended.

        Do nothing for a slice that is lost already."""
        gone = self.slices.pop(slice_id, None)
        if gone is None:
            return
        self.lost.append(gone)
        displaced: list[Request] = []
        for tracked in gone.lose():
            if tracked.ending:
                continue
            tracked.slice_id = ""
            tracked.resumed = True
            self._recalled.discard(tracked.request.id)
            displaced.append(tracked.as_of_now())
        self.notify(ev.SliceLost(slice_id, tuple(displaced)))
        self.timeline.at(self.timeline.now + back_s, self._up, self._simulated[slice_id])
