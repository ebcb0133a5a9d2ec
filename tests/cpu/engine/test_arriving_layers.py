"""Steps of a model whose layers are on their way to where steps read them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lane import Lane, LateModel
from tiny import make_checkpoint
from torch import Tensor

from c2cserve.core.events import StepDone, StepFailed, StepParked
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import Layer, TokenRows

PROMPT = torch.randint(3, 160, (30,), generator=torch.Generator().manual_seed(3)).tolist()
LAYERS = 3


class Watching(CpuOps):
    """Notes which layers are launched, call by call, and that each may be."""

    def __init__(self, loads: "Loads") -> None:
        super().__init__(1)
        self._loads = loads
        self.calls: list[list[int]] = []
        self.cold: set[int] = set()
        """Addresses of layers of the model that is loaded."""

    def run_layers(
        self, hidden: Tensor, layers: Sequence[Layer], rows: TokenRows,
        rope: tuple[Tensor, Tensor], arena: Tensor, wanted: Tensor | None = None,
    ) -> None:  # fmt: skip
        if layers[0].weights.qkv.data_ptr() in self.cold:
            there = self._loads.there
            assert there is None or layers[-1].index < there, "a layer is read before it is there"
            self.calls.append([layer.index for layer in layers])
        super().run_layers(hidden, layers, rows, rope, arena, wanted)


@dataclass
class Loads:
    """The one load under way."""

    there: int | None = 0

    def arrived(self, model: str) -> int | None:
        return self.there if model == "cold" else None


@dataclass
class Slice:
    cold: LateModel
    other: LateModel
    loads: Loads = field(default_factory=Loads)

    def __post_init__(self) -> None:
        self.ops = Watching(self.loads)
        self.lane = Lane(self.ops, arrived=self.loads.arrived)
        self.lane.attach("cold", self.cold.decoder)
        self.lane.attach("other", self.other.decoder)
        prepared = self.cold.decoder.prepared(self.ops)
        assert prepared is not None
        self.ops.cold = {layer.weights.qkv.data_ptr() for layer in prepared[0]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LateModel, LateModel]:
    folder: Path = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama")
    return LateModel(folder).load_all(), LateModel(folder).load_all()


@pytest.fixture(scope="module")
def want(models: tuple[LateModel, LateModel]) -> list[int]:
    lane = Lane()
    lane.attach("m", models[0].decoder)
    lane.add("a", "m", PROMPT, 4)
    lane.finish("a")
    return lane.tokens("a")


def test_a_prompt_is_computed_layer_by_layer_as_they_arrive(
    models: tuple[LateModel, LateModel], want: list[int]
) -> None:
    slice_ = Slice(*models)
    lane = slice_.lane
    lane.add("a", "cold", PROMPT, 4)
    lane.add("b", "other", PROMPT, 4)
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    for there in range(1, LAYERS):
        slice_.loads.there = there
        assert not lane.executor.poll().parked, "whoever polls is notified"
        assert slice_.ops.calls == [[index] for index in range(there)]
        assert not lane.deltas
    lane.finish("b")
    assert lane.tokens("b") == want, "others run meanwhile"
    slice_.loads.there = None
    lane.executor.poll()
    assert slice_.ops.calls == [[0], [1], [2]], "no layer is computed twice"
    done = lane.events[-1]
    assert isinstance(done, StepDone)
    lane.note(done)
    for position in range(30, 33):
        lane.step(("a", position, 1))
    assert lane.tokens("a") == want
    parked = [event for event in lane.events if isinstance(event, StepParked)]
    assert len(parked) == 1, "said once"


def test_layers_that_are_there_run_together(models: tuple[LateModel, LateModel]) -> None:
    slice_ = Slice(*models)
    slice_.loads.there = 2
    slice_.lane.add("a", "cold", PROMPT, 4)
    assert isinstance(slice_.lane.step(("a", 0, 30)), StepParked)
    assert slice_.ops.calls == [[0, 1]]
    slice_.loads.there = None
    slice_.lane.land()
    assert slice_.ops.calls == [[0, 1], [2]]


def test_a_load_that_is_refused_halfway_leaves_the_rest_where_it_is(
    models: tuple[LateModel, LateModel], want: list[int]
) -> None:
    slice_ = Slice(*models)
    slice_.lane.add("a", "cold", PROMPT, 1)
    slice_.loads.there = 1
    assert isinstance(slice_.lane.step(("a", 0, 30)), StepParked)
    slice_.loads.there = None
    slice_.lane.land()
    assert slice_.ops.calls == [[0], [1, 2]]
    assert slice_.lane.tokens("a") == want[:1]


def test_a_step_that_is_parked_is_not_looked_at_until_a_layer_has_come(
    models: tuple[LateModel, LateModel],
) -> None:
    slice_ = Slice(*models)
    lane = slice_.lane
    lane.add("a", "cold", PROMPT, 4)
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    launches = lane.executor.costs.launch_s["prefill"]
    for _ in range(3):
        lane.executor.poll()
    assert lane.executor.costs.launch_s["prefill"] == launches
    slice_.loads.there = 1
    lane.executor.poll()
    assert lane.executor.costs.launch_s["prefill"] > launches


def test_a_layer_that_comes_while_its_step_parks_is_not_missed(
    models: tuple[LateModel, LateModel],
) -> None:
    slice_ = Slice(*models)
    loads, asked = slice_.loads, list[str]()

    def arrived(model: str) -> int | None:
        """The first layer comes right after the step has looked for it."""
        there = loads.there
        asked.append(model)
        loads.there = 1
        return there

    lane = Lane(slice_.ops, arrived=arrived)
    lane.attach("cold", slice_.cold.decoder)
    lane.add("a", "cold", PROMPT, 4)
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    lane.executor.poll()
    assert slice_.ops.calls == [[0]]


@pytest.mark.parametrize("how", ["abandon", "detach"])
def test_steps_of_a_model_that_goes_fail_and_read_nothing_more(
    models: tuple[LateModel, LateModel], want: list[int], how: str
) -> None:
    slice_ = Slice(*models)
    lane = slice_.lane
    lane.add("a", "cold", PROMPT, 4)
    lane.add("b", "other", PROMPT, 4)
    slice_.loads.there = 1
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    getattr(lane.executor, how)("cold")
    failed = lane.events[-1]
    assert isinstance(failed, StepFailed)
    assert "here no more" in failed.reason
    slice_.loads.there = None
    lane.executor.poll()
    assert slice_.ops.calls == [[0]]
    lane.finish("b")
    assert lane.tokens("b") == want


Turns = st.lists(st.sampled_from(["layer", "poll", "prompt", "other", "refused"]), max_size=30)


@settings(max_examples=examples(60), deadline=None)
@given(turns=Turns)
def test_in_any_order_no_layer_is_read_before_it_is_there(
    models: tuple[LateModel, LateModel], want: list[int], turns: list[str]
) -> None:
    slice_ = Slice(*models)
    lane, names = slice_.lane, list[str]()
    others = iter(range(len(want)))
    lane.add("o", "other", PROMPT, 4)
    for turn in turns:
        there = slice_.loads.there
        match turn:
            case "layer" if there is not None:
                slice_.loads.there = None if there + 1 == LAYERS else there + 1
            case "refused":
                slice_.loads.there = None
            case "prompt" if len(names) < 4:
                names.append(f"r{len(names)}")
                lane.add(names[-1], "cold", PROMPT, 1)
                lane.launch((names[-1], 0, 30))
            case "other" if (number := next(others, None)) is not None:
                start, count = (0, 30) if number == 0 else (29 + number, 1)
                lane.step(("o", start, count))
            case _:
                lane.executor.poll()
    slice_.loads.there = None
    lane.executor.poll()
    for name in names:
        assert lane.tokens(name) == want[:1]
    assert [index for call in slice_.ops.calls for index in call].count(0) == len(names)
