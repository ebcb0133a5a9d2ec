"""All APIs in which text is asked for -> the reader of their requests, in a text process."""

from pydantic import ValidationError

from c2cserve.server.doors.anthropic.fields import read_messages
from c2cserve.server.doors.ollama.fields import read_chat, read_generate
from c2cserve.server.doors.responses.fields import read_responses
from c2cserve.server.doors.translation import Reader, Translated
from c2cserve.server.errors import of_validation
from c2cserve.server.fields import ChatBody, CompletionBody
from c2cserve.server.text.messages import Api


def _own(kind: type[ChatBody] | type[CompletionBody]) -> Reader:
    """Return the reader of OpenAI's bodies, which need no translation."""

    def read(body: bytes) -> Translated:
        try:
            return Translated(kind.model_validate_json(body))
        except ValidationError as error:
            raise of_validation(error) from error

    return read


READERS: dict[Api, Reader] = {
    "completions": _own(CompletionBody), "chat": _own(ChatBody), "messages": read_messages,
    "responses": read_responses, "ollama_chat": read_chat, "ollama_generate": read_generate,
}  # fmt: skip
