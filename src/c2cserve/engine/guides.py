"""Grammars of the requests on a slice, and the masks of a step's rows.

    tokens known        masks are made on a thread while the step's layers run
    a token in flight   the layers are launched ahead, and read it from the GPU. Sampling is
                        launched once it is known and the masks are made, while they still run

So no step waits for a mask that takes no longer than its layers, and no row without a grammar has
one. A grammar is built on a thread before its request is added, because that may take a second.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.core.request import Job
from c2cserve.engine.sequences import Sequence as Seq
from c2cserve.grammars.matching import Masks, Matcher, Matchers, mask_words
from c2cserve.kernels.ops import RowSampling, Sample, SampledTokens


@dataclass(slots=True)
class PendingMasks:
    """The masks of one step, on their way."""

    seqs: list[Seq]
    """The sequences that have some, in the order of `masks`."""
    masks: Masks
    made: "Future[None]"


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

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        """`notify` is called on a thread when a grammar is built."""
        self._matchers = Matchers()
        self._notify = notify
        self._building: dict[str, Future[Matcher]] = {}

    # ---- requests -------------------------------------------------------------------------------

    def prepare(self, job: Job, vocab: int) -> bool:
        """Begin to build a request's grammar. Return whether the request may be added at once; else
        `prepared` names it later."""
        grammar = job.sampling.grammar
        if grammar is None:
            return True
        output = _output_of(job)
        built = self._matchers.build(grammar, vocab, output)
        self._building[job.request.id] = built
        built.add_done_callback(lambda _: self._notify())
        return False

    def prepared(self) -> list[str]:
        """Return the requests whose grammars are built, or cannot be."""
        return [name for name, one in self._building.items() if one.done()]

    def forget(self, request_id: str) -> None:
        """Drop what was prepared for a request that is not added."""
        self._building.pop(request_id, None)

    def matcher(self, job: Job, vocab: int) -> Matcher | None:
        """Return the matcher of a request, prepared or built now. Raises GrammarFailed, and OSError
        if the vocabulary's file cannot be read."""
        grammar = job.sampling.grammar
        if grammar is None:
            return None
        built = self._building.pop(job.request.id, None)
        if built is not None:
            return built.result()
        return self._matchers.matcher(grammar, vocab, _output_of(job))

    # ---- masks ----------------------------------------------------------------------------------

    def begin(self, sampled: Sequence[Seq], vocab: int) -> PendingMasks | None:
        """Begin to make the masks of the rows that are to be sampled. All their tokens are known.
        None if no row has a grammar."""
        seqs = [seq for seq in sampled if seq.matcher is not None and not seq.lost]
        if not seqs:
            return None
        masks = np.empty((len(seqs), mask_words(vocab)), np.int32)
        matchers = [seq.matcher for seq in seqs if seq.matcher is not None]
        return PendingMasks(seqs, masks, self._matchers.begin(matchers, masks))

    @staticmethod
    def masked(
        rows: list[RowSampling], sampled: Sequence[Seq], pending: PendingMasks | None
    ) -> list[RowSampling]:
        """Return the rows with their masks, which are waited for."""
        if pending is None:
            return rows
        pending.made.result()
        places = {id(seq): i for i, seq in enumerate(pending.seqs)}
        return [
            row if (at := places.get(id(seq))) is None else _with_mask(row, pending.masks[at])
            for row, seq in zip(rows, sampled, strict=True)
        ]


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


def _output_of(job: Job) -> tuple[int, ...]:
    sent = job.request.sent
    return job.tokens[len(job.tokens) - sent :] if sent else ()
