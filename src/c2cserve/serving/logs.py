"""Logs of every process of a server, to stderr: a JSON object or a readable line per event."""

import logging
import sys
import time
from typing import Literal

import msgspec

from c2cserve.serving.log_output import LogOutput

LogFormat = Literal["json", "text"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes a JSON object per event; `logging`'s `extra` fields become fields of the object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


_SHOWN = ("request_id", "model", "param", "code")
"""The fields of a record that a line of text shows: they identify the request and its fault."""
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), 127, 0x85, 0x2028, 0x2029)}


class TextFormatter(logging.Formatter):
    """Writes one line per event, then its traceback. Text from clients cannot begin a new line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = vars(record)
        shown = [f"{name}={fields[name]}" for name in _SHOWN if fields.get(name) is not None]
        return " ".join([super().formatMessage(record), *shown]).translate(_CONTROL)


def setup_logging(process: str, level: str, format_: LogFormat) -> None:
    """Send this process's logs to stderr. Raises ValueError for an unknown level."""
    handler = LogOutput(sys.stderr.fileno())
    if format_ == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        layout = f"%(asctime)s %(levelname)-7s [{process}] %(message)s"
        handler.setFormatter(TextFormatter(layout, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
