"""A slot of a link: a stream and an event, and the micro-task that they carry."""

from collections.abc import Sequence
from typing import Any

from c2cserve.kernels.gpu.driver import CudaError, call_on_host, checked, copy_async, cu
from c2cserve.transfer.gpu.contexts import context_of, use
from c2cserve.transfer.gpu.flags import Flags
from c2cserve.transfer.gpu.relay import Relay, RelayArguments
from c2cserve.transfer.moves import Piece
from c2cserve.transfer.wake import Wake

_NOT_READY = 600
"""CUDA_ERROR_NOT_READY"""


class Slot:
    """Carries one micro-task at a time. All methods raise `CudaError`."""

    def __init__(self, gpu: int, wake: Wake) -> None:
        self.gpu = gpu
        self._wake = wake
        self.context: Any = context_of(gpu)
        with use(gpu):
            # Streams of another priority than the callers' share no work queue with held ones.
            _, highest = checked("cuCtxGetStreamPriorityRange", cu.cuCtxGetStreamPriorityRange())
            blocking = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            made = cu.cuStreamCreateWithPriority(blocking, highest)
            self.stream: Any = checked("cuStreamCreateWithPriority", made)
            timeless = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._event: Any = checked("cuEventCreate", cu.cuEventCreate(timeless))

    def warm(self) -> None:
        """Do once what a micro-task does, without its bytes.

        CUDA may wait for all that a context has when it first loads a kernel. While a stream is
        held, that could be for ever.
        """
        self._end()
        checked("cuStreamSynchronize", cu.cuStreamSynchronize(self.stream))

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Begin to copy by copy engine."""
        copy_pieces(pieces, self.stream)
        self._end()

    def _end(self) -> None:
        checked("cuEventRecord", cu.cuEventRecord(self._event, self.stream))
        call_on_host(int(self.stream), self._wake.function, self._wake.semaphore)

    def is_over(self) -> bool:
        result = cu.cuEventQuery(self._event)
        if int(result[0]) == _NOT_READY:
            return False
        checked("cuEventQuery", result)
        return True

    def close(self) -> None:
        checked("cuStreamSynchronize", cu.cuStreamSynchronize(self.stream))
        checked("cuEventDestroy", cu.cuEventDestroy(self._event))
        checked("cuStreamDestroy", cu.cuStreamDestroy(self.stream))


class RelaySlot(Slot):
    """A slot whose micro-tasks are kernels, which can be recalled."""

    def __init__(
        self, gpu: int, wake: Wake, relay: Relay, ctas: int, flags: Flags, number: int
    ) -> None:
        """Flags `number` and `number + 1` belong to the slot."""
        super().__init__(gpu, wake)
        self._relay, self._ctas, self._flags = relay, ctas, flags
        self._recalled, self._started = number, number + 1
        self._arguments = RelayArguments(flags.address(number), flags.address(number + 1))

    def warm(self) -> None:
        self.copy(())
        super().warm()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Begin to copy by the SMs of the slot's GPU."""
        self._arguments.set(pieces)
        try:
            self._relay.launch(self._arguments, self._ctas, self.stream)
            self._end()
        except CudaError:
            self.recall()  # it may have been launched
            raise

    def recall(self) -> None:
        """Let the last launch write nothing more, except what its warps have just loaded."""
        self._flags[self._recalled] = self._arguments.number
        # This processor orders a store before later loads at an atomic operation, which a post has.
        self._wake.post()

    @property
    def has_begun(self) -> bool:
        """Whether the last launch has begun. If it has not and was recalled, it never writes."""
        return self._flags[self._started] == self._arguments.number


def copy_pieces(pieces: Sequence[Piece], stream: Any) -> None:
    """Copy by copy engine, many pieces with one call. Raises `CudaError`."""
    if len(pieces) == 1:
        copy_async(pieces[0].target, pieces[0].source, pieces[0].size, int(stream))
        return
    attributes = cu.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    result = cu.cuMemcpyBatchAsync(
        [cu.CUdeviceptr(piece.target) for piece in pieces],
        [cu.CUdeviceptr(piece.source) for piece in pieces],
        [piece.size for piece in pieces],
        len(pieces), [attributes], [0], 1, stream,
    )  # fmt: skip
    checked("cuMemcpyBatchAsync", result)
