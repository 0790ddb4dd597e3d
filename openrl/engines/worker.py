"""The other end of `engines.process`: `python -m openrl.engines.worker`, one engine, one pipe.

Orders come on stdin, answers leave on what stdout was; stdout itself is stderr from then on, so
that a library that prints spoils nothing. The process ends when stdin does, in the middle of
a pass too: its parent is gone then, however it went.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

from openrl.engines import frames
from openrl.engines.base import Engine, LoadProgress
from openrl.engines.frames import Call, Hello, Raised, Returned
from openrl.errors import OpenRLError, blamed_on_engine

log = logging.getLogger("openrl")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = os.fdopen(os.dup(0), "rb")  # not sys.stdin: the interpreter's end locks that
    hello: Hello = frames.receive(calls)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.setLevel(hello.log_level)
    orders: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(calls, orders), daemon=True).start()
    _obey(_engine(hello), orders, answers)


def _engine(hello: Hello) -> Engine:
    module, _, name = hello.engine.partition(":")
    engine: Engine = getattr(import_module(module), name)(*hello.arguments)
    return engine


def _listen(pipe: BinaryIO, orders: queue.SimpleQueue[Call]) -> None:
    try:
        while True:
            orders.put(frames.receive(pipe))
    except (EOFError, OSError):
        os._exit(0)  # whatever the engine is doing, nobody waits for it
    except Exception:
        # The parent waits for an answer that nobody would give.
        log.exception("an order cannot be read")
        os._exit(1)


def _obey(engine: Engine, orders: queue.SimpleQueue[Call], answers: BinaryIO) -> None:
    def progress(step: LoadProgress) -> None:
        frames.send(answers, step)

    while True:
        call = orders.get()
        frames.send(answers, _answer(engine, call, progress))
        if call.method == "close":
            return


def _answer(
    engine: Engine, call: Call, progress: Callable[[LoadProgress], None]
) -> Returned | Raised:
    try:
        return Returned(_called(engine, call, progress))
    except Exception as error:
        # The engine's boundary: what it raises is told to the parent.
        if not isinstance(error, OpenRLError):
            log.exception("the engine failed in %s", call.method)
        return Raised(blamed_on_engine(error))


def _called(engine: Engine, call: Call, progress: Callable[[LoadProgress], None]) -> Any:
    match call.method:
        case "describe":
            return list(engine.describe())
        case "load":
            return engine.load(progress)
        case "close":
            return engine.close()
        case _:
            assert call.work is not None
            return engine.execute(call.work)


if __name__ == "__main__":
    main()
