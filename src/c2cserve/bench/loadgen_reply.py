"""One streamed answer of an OpenAI server, timed as its bytes arrive."""

import msgspec


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: "PromptDetails | None" = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class Piece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: Piece | None = None
    message: Piece | None = None
    finish_reason: str | None = None


class ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None


class Chunk(msgspec.Struct):
    """The parts of a completion (whole, or one event of a stream) that a measurement needs."""

    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


_decoder = msgspec.json.Decoder(Chunk)


class Record(msgspec.Struct):
    """The result of one request. Times are seconds since the run's start; -1: did not happen."""

    index: int
    model: str
    due_s: float
    """When it was meant to be sent: latencies count from here."""
    sent_s: float = -1.0
    first_s: float = -1.0
    """When its first token arrived."""
    last_s: float = -1.0
    """When its last token arrived."""
    end_s: float = -1.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gaps_s: list[float] = []
    """Between consecutive arrivals of output (a server may send several tokens at once)."""
    finish: str = ""
    text: str = ""
    """Kept only when asked for."""
    request_id: str = ""
    """What the server calls it in its log."""
    error: str = ""
    """Its kind (`http 429`, `timeout`, `connect`, `disconnected`, `protocol`); empty: answered."""
    error_detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


class Reply:
    """Feeds one response's body into its `Record`."""

    __slots__ = ("_buffer", "_done", "_keep_text", "_outputs", "_streaming", "_texts", "record")

    def __init__(self, record: Record, *, keep_text: bool = False) -> None:
        self.record = record
        self._buffer = bytearray()
        self._streaming = False
        self._done = False
        self._outputs = 0
        self._keep_text = keep_text
        self._texts: list[str] = []

    def begin(self, status: int, content_type: bytes) -> None:
        self._streaming = content_type.startswith(b"text/event-stream")
        if status != 200:
            self.record.error = f"http {status}"

    def feed(self, data: bytes, now_s: float) -> None:
        self._buffer += data
        if not self._streaming or self.record.error:
            return
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).strip()
            del self._buffer[: end + 1]
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def finish(self, now_s: float) -> None:
        """The body is complete."""
        record = self.record
        record.end_s = now_s
        if record.error:
            record.error_detail = self._message(bytes(self._buffer))
        elif not self._streaming:
            self._event(bytes(self._buffer), now_s)
            self._done = True
        if record.ok and not self._done:
            record.error, record.error_detail = "protocol", "the stream ended without [DONE]"
        if record.ok and record.first_s < 0:
            record.error, record.error_detail = "protocol", "no token and no finish reason came"
        if record.output_tokens == 0:
            record.output_tokens = self._outputs
        record.text = "".join(self._texts)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decoder.decode(data)
        except msgspec.DecodeError as error:
            self.record.error, self.record.error_detail = "protocol", str(error)
            return
        if chunk.error is not None:
            self.record.error, self.record.error_detail = "server", chunk.error.message
            return
        if chunk.usage is not None:
            self._usage(chunk.usage)
        for choice in chunk.choices:
            self._choice(choice, now_s)

    def _usage(self, usage: Usage) -> None:
        self.record.prompt_tokens = usage.prompt_tokens
        self.record.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        self.record.cached_tokens = (details.cached_tokens or 0) if details else 0

    def _choice(self, choice: ChunkChoice, now_s: float) -> None:
        record = self.record
        piece = choice.delta or choice.message
        text = choice.text or ""
        if piece is not None:
            text = piece.content or piece.reasoning_content or ""
        if self._keep_text:
            self._texts.append(text)
        if choice.finish_reason:
            record.finish = choice.finish_reason
        # A chat stream opens with an empty role message, and a last event may bring no text: only
        # text is a token, except that an answer without any begins when it finishes. A completion
        # has no such message. Its first event is its first token, even if that has no text: a part
        # of a character, or a special token.
        begins = record.first_s < 0 and (choice.text is not None or bool(choice.finish_reason))
        if text:
            self._outputs += 1
            if record.first_s >= 0:
                record.gaps_s.append(now_s - record.last_s)
        if text or begins or (choice.text is not None and choice.finish_reason):
            record.last_s = now_s
            if record.first_s < 0:
                record.first_s = now_s

    @staticmethod
    def _message(body: bytes) -> str:
        try:
            chunk = _decoder.decode(body)
        except msgspec.DecodeError:
            return body[:200].decode(errors="replace")
        return chunk.error.message if chunk.error else body[:200].decode(errors="replace")
