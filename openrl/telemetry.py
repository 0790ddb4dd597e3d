"""Logging: short lines for people, or one JSON object a line for machines. Always on stderr."""

from __future__ import annotations

import functools
import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from rich.console import Console
from rich.logging import RichHandler

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the HTTP request on whose behalf something is logged; empty outside of any."""


@functools.cache
def console() -> Console:
    """The one on stderr, shared by log lines and live progress so that neither tears the other."""
    return Console(stderr=True)


def set_up_logging(level: str, log_format: Literal["pretty", "json"]) -> None:
    """Replaces the root's handlers. Libraries below "warning" stay quiet."""
    logging.basicConfig(level=logging.WARNING, handlers=[_handler(log_format)], force=True)
    logging.getLogger("openrl").setLevel(level.upper())


def _handler(log_format: str) -> logging.Handler:
    if log_format == "pretty" and console().is_terminal:
        pretty = RichHandler(console=console(), show_path=False, log_time_format="[%X]")
        pretty.setFormatter(PlainFormatter("%(message)s"))
        return pretty
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else _PLAIN)
    return handler


class PlainFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        name = request_id.get()
        return super().formatMessage(record) + (f" [{name}]" if name else "")


_PLAIN = PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.get():
            line["request_id"] = name
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
