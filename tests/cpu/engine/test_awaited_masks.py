"""Masks that a device waits for: the worker does not, and the wait ends whatever happens."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from late import LateOps, LateSample
from torch import Tensor

from c2cserve.core.request import Grammar, Job, Request, Sampling
from c2cserve.engine.guides import GuidedSample, Guides, PendingMasks
from c2cserve.engine.sequences import Sequence as Seq
from c2cserve.grammars import write
from c2cserve.grammars.matching import mask_words
from c2cserve.grammars.memory import HEAD_WORDS, PLACES, MaskMemory
from c2cserve.grammars.outputs import Grammars
from c2cserve.grammars.table import write_table
from c2cserve.kernels.ops import AwaitedMasks, RowSampling, SampledTokens

SIZE, ENDS = 100, (2,)
LOGITS = torch.zeros((3, SIZE))
SOON_S = 20.0
"""Longer than any of this takes on a busy machine."""


class Device(LateOps):
    """Samples token 7 in each row, and waits for no masks: the test looks at them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[AwaitedMasks] = []
        self.rows: list[Sequence[RowSampling]] = []

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> LateSample:
        self.rows.append(rows)
        if awaited is not None:
            self.awaited.append(awaited)
        return LateSample(SampledTokens([7] * len(rows), [0.0] * len(rows)))


class Bench:
    """Two sequences with grammars, and one without between them."""

    def __init__(self, grammar: Grammar, patience_s: float = 600.0) -> None:
        self.grammars = Grammars(MaskMemory(patience_s))
        self.grammars.memory.register(lambda data: data.ctypes.data)
        self.guides = Guides(grammars=self.grammars)
        self.outputs = self.grammars.of(grammar, SIZE)
        self.ops = Device()
        self.seqs = [self._seq(str(i), grammar if i != 1 else None) for i in range(3)]

    def _seq(self, name: str, grammar: Grammar | None, penalty: float = 0.0) -> Seq:
        sampling = replace(
            Sampling(seed=1, stop_token_ids=ENDS, grammar=grammar), presence_penalty=penalty
        )
        job = Job(Request(name, "m", 2, 20, 0.0), (5, 6), sampling)
        seq = Seq.of(job, 0.0)
        if grammar is not None:
            seq.held = self.guides.output(job, SIZE)
        seq.chained = self.ops.chains(seq.row_sampling())
        return seq

    def pending(self) -> PendingMasks:
        pending = self.guides.begin(self.seqs, SIZE)
        assert pending is not None
        return pending

    def launch(self) -> GuidedSample:
        rows = [seq.row_sampling() for seq in self.seqs]
        sample = self.guides.sample(self.ops, LOGITS, rows, self.seqs, self.pending())
        assert isinstance(sample, GuidedSample)
        return sample

    def signal(self, number: signal.Signals) -> None:
        assert self.outputs.pid is not None
        os.kill(self.outputs.pid, number)

    def is_free(self, place: int) -> bool:
        region = self.grammars.memory.take(2, mask_words(SIZE))
        return region is not None and region.address == place

    def until_ready(self) -> None:
        began_s = time.monotonic()
        while not int(self.ops.awaited[-1].words[0]):
            assert time.monotonic() - began_s < SOON_S
            time.sleep(0.001)


@pytest.fixture(scope="module")
def grammar(tmp_path_factory: pytest.TempPathFactory) -> Grammar:
    tokens = [b""] * 3 + [bytes([one]) for one in b"abcdefghij"] + [b""] * 87
    table = write_table(str(tmp_path_factory.mktemp("table") / "run"), tokens)
    return Grammar(write.grammar_of(write.regex("[c-f]+")), table, ENDS)


@pytest.fixture(params=[600.0])
def bench(grammar: Grammar, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(grammar, request.param)
    yield made
    made.grammars.close()


def test_sampling_is_launched_before_the_masks_are_made(bench: Bench) -> None:
    bench.signal(signal.SIGSTOP)
    sample = bench.launch()
    (awaited,) = bench.ops.awaited
    assert not int(awaited.words[0])
    bench.signal(signal.SIGCONT)
    bench.until_ready()
    assert awaited.words[awaited.places_at :][:3].tolist() == [0, -1, 1]
    masks = awaited.words[awaited.masks_at :][: awaited.count * awaited.width].numpy()
    allowed = np.unpackbits(masks.view(np.uint8), bitorder="little").reshape(2, -1)
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[5, 6, 7, 8]] * 2
    assert all(row.mask is None for row in bench.ops.rows[0])
    assert sample.collect().ids == [7, 7, 7]
    assert bench.guides.awaited == 1


@pytest.mark.parametrize(("bench", "ends"), [(0.1, False), (600.0, True)], indirect=["bench"])
def test_a_device_does_not_wait_for_ever(bench: Bench, ends: bool) -> None:
    """Rows without a mask keep their tokens. A process that has ended is not waited for at all."""
    bench.signal(signal.SIGSTOP)
    sample = bench.launch()
    if ends:
        bench.signal(signal.SIGKILL)
    bench.until_ready()
    assert sample.collect().ids == [-1, 7, -1]
    assert [bench.guides.failure(seq) for seq in (bench.seqs[0], bench.seqs[2])] == ["", ""]
    assert bench.guides.waited == 2
    if not ends:
        bench.signal(signal.SIGCONT)
    began_s = time.monotonic()
    while len(bench.guides.prepared()) < 2:
        assert time.monotonic() - began_s < SOON_S, "they are prepared again"
        time.sleep(0.001)


def test_a_failed_output_gets_no_token_whatever_its_mask(bench: Bench) -> None:
    bench.launch().collect()
    for place in (0, 2):
        held = bench.seqs[place].held
        assert held is not None
        held.take(9 if place else 7)  # "g" does not fit
    sample = bench.launch()
    bench.until_ready()
    assert sample.collect().ids == [7, 7, -1]
    assert "cannot go on" in bench.guides.failure(bench.seqs[2])


def test_no_place_is_used_again_before_its_process_has_answered(bench: Bench) -> None:
    bench.signal(signal.SIGSTOP)
    first = bench.launch()
    place = bench.ops.awaited[-1].address
    region = first._pending.fill.region
    assert region is not None
    region.abandon()
    del region
    assert first.collect().ids == [-1, 7, -1]
    del first
    assert not bench.is_free(place)
    bench.signal(signal.SIGCONT)
    began_s = time.monotonic()
    while not bench.is_free(place):
        assert time.monotonic() - began_s < SOON_S
        bench.pending().fill.result()


def test_rows_that_the_host_samples_are_waited_for_there(bench: Bench, grammar: Grammar) -> None:
    bench.seqs[2] = bench._seq("penalized", grammar, penalty=0.5)
    rows = [seq.row_sampling() for seq in bench.seqs]
    bench.guides.sample(bench.ops, LOGITS, rows, bench.seqs, bench.pending()).collect()
    assert not bench.ops.awaited
    assert [row.mask is not None for row in bench.ops.rows[0]] == [True, False, True]


def test_a_region_is_free_when_nothing_refers_to_it() -> None:
    memory = MaskMemory()
    memory.register(lambda _: 1 << 20)
    words = mask_words(128_000)
    regions = [memory.take(32, words) for _ in range(3)]
    assert all(one is not None and one.address for one in regions)
    begins = [one.masks_at for one in regions if one is not None]
    assert len({*begins}) == 3
    regions[1] = None
    again = memory.take(32, words)
    assert again is not None
    assert again.masks_at == begins[1]
    assert again.masks.shape == (32, words)
    assert len(again.words) >= HEAD_WORDS + 32 * words
    assert HEAD_WORDS > PLACES


def test_masks_beyond_the_registered_part_are_not_for_the_device() -> None:
    memory = MaskMemory()
    memory.register(lambda _: 1 << 20)
    large = memory.take(2_100, mask_words(128_000))
    assert large is not None
    assert not large.address
    assert memory.take(20_000, mask_words(128_000)) is None
