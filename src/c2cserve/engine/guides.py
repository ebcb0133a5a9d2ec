"""Grammars of the requests on a slice, and the masks of a step's rows.

    tokens known        masks are made in a process of their own while the step's layers run
    a token in flight   the layers are launched ahead, and read it from the GPU. Once the host
                        knows it, masks are asked for and sampling is launched

    GPU     | layers of step 2 ..................... | wait | sample | layers of step 3 ...
    worker  | tokens of 1 | ask | sample 2 | plan and launch step 3 |
    process                   | masks of 2 ...| ready

The GPU waits for masks, and the worker goes on (`grammars.memory`). Masks are asked for before the
wait is launched, so no work of the worker ever stands between a waiting GPU and its masks. Where
the host samples a row with a mask, the step's masks are waited for before sampling is launched.

So no step waits for a mask that takes no longer than its layers, and no row without a grammar has
one. A grammar is built before its request is added, because that may take a second. If a mask is
late, its request leaves the slice's steps, and is prepared again with the tokens that it has.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.core.request import Job
from c2cserve.engine.run import Run, emitting
from c2cserve.engine.sequences import Sequence as Seq
from c2cserve.grammars.matching import GrammarFailed
from c2cserve.grammars.memory import HEAD_WORDS, PLACES, PLACES_AT, Region
from c2cserve.grammars.outputs import Grammars, Held, PendingFill
from c2cserve.kernels.ops import AwaitedMasks, Ops, RowSampling, Sample, SampledTokens


@dataclass(slots=True)
class PendingMasks:
    """The masks of one step, on their way."""

    seqs: list[Seq]
    """The sequences that have some, in the order of the masks."""
    fill: PendingFill


class GuidedSample:
    """The sample of a step whose masks its device waits for."""

    def __init__(self, sample: Sample, pending: PendingMasks, rows: list[int]) -> None:
        """`rows`: those with masks, in their order."""
        self._sample = sample
        self._pending = pending
        self._rows = rows

    @property
    def done(self) -> bool:
        return self._sample.done

    @property
    def chain(self) -> Tensor | None:
        return self._sample.chain

    def collect(self) -> SampledTokens:
        """Collect the tokens, but for those whose masks the device did not have."""
        tokens = self._sample.collect()
        fill = self._pending.fill
        fill.conclude()
        for row, held in zip(self._rows, fill.helds, strict=True):
            if held.failure or held.late:
                tokens.ids[row] = -1
        return tokens


class LateSample:
    """The sample of a step that some token is still missing for. It is launched when all steps
    before it are collected."""

    def __init__(self, launch: Callable[[], Sample]) -> None:
        self._launch = launch
        self._sample: Sample | None = None
        self._fault: Exception | None = None

    def launch(self) -> None:
        """Launch it, once. What that raises is raised by `collect`."""
        if self._sample is None and self._fault is None:
            try:
                self._sample = self._launch()
            except Exception as fault:  # noqa: BLE001 - raised where the step is collected
                self._fault = fault

    @property
    def done(self) -> bool:
        return self._fault is not None or (self._sample is not None and self._sample.done)

    @property
    def chain(self) -> Tensor | None:
        return None if self._sample is None else self._sample.chain

    def collect(self) -> SampledTokens:
        self.launch()
        if self._sample is None:
            assert self._fault is not None
            raise self._fault
        return self._sample.collect()


class Guides:
    """The grammars of one slice. Not thread-safe, but for its own threads."""

    def __init__(
        self, notify: Callable[[], None] = lambda: None, grammars: Grammars | None = None
    ) -> None:
        """`notify` is called on a thread when a grammar is built."""
        self._grammars = Grammars() if grammars is None else grammars
        self._notify = notify
        self._building: dict[str, tuple[Job, Future[Held]]] = {}
        self.failed = 0
        """Requests whose grammars could not be built, or not go on."""
        self.awaited = 0
        """Steps whose masks their device waits for."""
        self.waited = 0
        """How often requests left the slice's steps, because their masks were late."""

    @property
    def processes_lost(self) -> int:
        return self._grammars.lost

    # ---- requests -------------------------------------------------------------------------------

    def prepare(self, job: Job, vocab: int) -> bool:
        """Begin to build a request's grammar. Return False: it cannot be added at once, and
        `prepared` has it later."""
        self._await(job, self._build(job, vocab))
        return False

    def _await(self, job: Job, built: "Future[Held]") -> None:
        self._building[job.request.id] = job, built
        built.add_done_callback(lambda _: self._notify())

    def _build(self, job: Job, vocab: int) -> Future[Held]:
        grammar, sent = job.sampling.grammar, job.request.sent
        assert grammar is not None
        output = job.tokens[len(job.tokens) - sent :] if sent else ()
        return self._grammars.of(grammar, vocab).build(grammar.text, output)

    def prepared(self) -> list[Job]:
        """Return the requests whose grammars are built, or cannot be."""
        return [job for job, built in self._building.values() if built.done()]

    def forget(self, request_id: str) -> bool:
        """Drop a request that is prepared, or has been, and is not added. Return whether there was
        one."""
        return self._building.pop(request_id, None) is not None

    def output(self, job: Job, vocab: int) -> Held:
        """Return the output of a request with a grammar, which was prepared or is built now. Raises
        GrammarFailed."""
        _, built = self._building.pop(job.request.id, (job, None))
        try:
            return (built or self._build(job, vocab)).result()
        except GrammarFailed:
            self.failed += 1
            raise

    def failure(self, seq: Seq) -> str:
        """Return why a sequence got no token. Count it if that is for its grammar. Empty: its mask
        was late, and what is left of the request is being prepared again."""
        held = seq.held
        if held is not None and held.failure:
            self.failed += 1
            return held.failure
        if held is not None and held.late:
            self.waited += 1
            self._await(seq.rest(), held.again())
            return ""
        return "the model computed values that are not numbers"

    # ---- masks ----------------------------------------------------------------------------------

    def begin(self, sampled: Sequence[Seq], vocab: int) -> PendingMasks | None:
        """Begin to make the masks of the rows that are to be sampled. All their tokens are known.
        None if no row has a grammar."""
        seqs = [seq for seq in sampled if seq.held is not None and not seq.lost]
        if not seqs:
            return None
        helds = [seq.held for seq in seqs if seq.held is not None]
        grammar = seqs[0].job.sampling.grammar  # one model has one vocabulary
        assert grammar is not None
        return PendingMasks(seqs, self._grammars.of(grammar, vocab).begin(helds))

    @staticmethod
    def masked(
        rows: list[RowSampling], sampled: Sequence[Seq], pending: PendingMasks | None
    ) -> list[RowSampling]:
        """Return the rows with their masks, which are waited for. A mask that is late is empty."""
        if pending is None:
            return rows
        masks = pending.fill.result()
        places = {id(seq): i for i, seq in enumerate(pending.seqs)}
        return [
            row if (at := places.get(id(seq))) is None else _with_mask(row, masks[at])
            for row, seq in zip(rows, sampled, strict=True)
        ]

    def sample(
        self, ops: Ops, logits: Tensor, rows: list[RowSampling], sampled: Sequence[Seq],
        pending: PendingMasks | None,
    ) -> Sample:  # fmt: skip
        """Launch the sampling of a step's rows with their masks."""
        if pending is None:
            return ops.sample(logits, rows)
        region, fill = pending.fill.region, pending.fill
        if region is None or len(rows) > PLACES or not _device_can_wait(region, pending):
            return ops.sample(logits, self.masked(rows, sampled, pending))
        numbers = {id(seq): i for i, seq in enumerate(pending.seqs)}
        places = [numbers.get(id(seq), -1) for seq in sampled]
        held = [row for row, place in enumerate(places) if place >= 0]
        region.place(places)
        self._grammars.memory.watch(region, fill.asked[0].process.alive)
        self.awaited += 1
        return GuidedSample(ops.sample(logits, rows, _awaited(region)), pending, held)


class StepMasks:
    """The masks of one step, from the launch of its layers to that of its sampling."""

    def __init__(self, guides: Guides, run: Run, vocab: int) -> None:
        """Begin to make them, unless some token that they depend on is in flight."""
        sampled = emitting(run)
        self._guides = guides
        self._vocab = vocab
        self._late = any(seq.held is not None and seq.in_flight for seq in sampled)
        self._pending = None if self._late else guides.begin(sampled, vocab)

    def sample(
        self, ops: Ops, logits: Tensor, sampled: Sequence[Seq], holds: Callable[[Seq], bool]
    ) -> Sample:
        """Launch sampling, at once or when all tokens before are known. `holds`: whether a sequence
        has not ended by then."""
        guides, rows = self._guides, [seq.row_sampling() for seq in sampled]
        if not self._late:
            return guides.sample(ops, logits, rows, sampled, self._pending)

        def launch() -> Sample:
            pending = guides.begin([seq for seq in sampled if holds(seq)], self._vocab)
            return guides.sample(ops, logits, rows, sampled, pending)

        return LateSample(launch)


def _device_can_wait(region: Region, pending: PendingMasks) -> bool:
    """Return whether a device reads the region, and samples all rows that have a mask."""
    return bool(region.address) and all(seq.chained for seq in pending.seqs)


def _awaited(region: Region) -> AwaitedMasks:
    count, width = region.masks.shape
    words = torch.from_numpy(region.words)
    return AwaitedMasks(words, region.address, PLACES_AT, HEAD_WORDS, count, width)


def _with_mask(row: RowSampling, mask: NDArray[np.int32]) -> RowSampling:
    """Return a row with its mask. If `min_tokens` bans all that the grammar allows, the grammar has
    ended, and its end is allowed."""
    banned = row.banned
    if banned is not None:
        ids = banned.numpy()
        left = mask.copy()
        bits = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)).view(np.int32)
        np.bitwise_and.at(left, ids // 32, ~bits)
        if not left.any():
            banned = None
    return replace(row, mask=torch.from_numpy(mask), banned=banned)
