"""What a person sees while a server starts: what is served, where, and how far loading is.

On a terminal progress is drawn live; elsewhere each stage and each quarter is one plain line,
which goes through the log when that is JSON, so that a machine can read all of stderr.
Safe to call from the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from openrl.config import Config
from openrl.engines.base import BaseModelInfo, LoadProgress, WeightsKey
from openrl.key_files import read_keys
from openrl.keys import checks_keys, is_loopback, unlisted_owner
from openrl.telemetry import console as shared_console
from openrl.types import OwnerId

log = logging.getLogger("openrl")

_NAMED = 20  # how many owners one line of the log names


class StartupView:
    """Calls come in this order: `serving`, `progress` as often as there is some, `ready`.

    Progress before `serving` is not shown; what the engine chose where the configuration says
    auto is in its stages. `close` may be called at any time and more than once; nothing is
    drawn live after it.
    """

    def __init__(
        self,
        config: Config,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._console = console or shared_console()
        self._draws = self._console.is_terminal and config.log_format == "pretty"
        self._clock = clock
        self._started = clock()
        self._introduced = False
        self._bars: dict[WeightsKey, TaskID] = {}
        self._said: set[tuple[WeightsKey, str, int]] = set()
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self._console,
        )

    def serving(self, infos: Sequence[BaseModelInfo], address: str) -> None:
        engine = self._config.engine
        self._introduced = True
        self._say(f"OpenRL listens at {address}, data in {self._config.data.absolute()}")
        self._say(who_is_let_in(self._config))
        self._say(
            f"{engine.kind} engine: device {engine.device}, dtype {engine.dtype}, "
            f"{engine.threads or 'default'} threads, waiting {engine.wait_policy}"
        )
        if self._draws:
            self._console.print(_table(infos))
        else:
            for info in infos:
                self._say(f"serves {info.name}: {_facts(info)}")

    def progress(self, step: LoadProgress) -> None:
        if not self._introduced:
            return
        if not self._draws:
            self._say_once(step)
            return
        if step.weights not in self._bars:
            self._live.start()
            self._bars[step.weights] = self._live.add_task(step.stage, total=1.0)
        self._live.update(self._bars[step.weights], description=step.stage, completed=step.fraction)

    def ready(self, address: str) -> None:
        self.close()
        self._say(f"ready after {self._clock() - self._started:.1f} s; Ctrl-C drains and stops")
        key = "tml-... (a listed one)" if checks_keys(self._config) else "tml-local"
        self._say(f"for the tinker SDK: TINKER_BASE_URL={address} TINKER_API_KEY={key}")

    def close(self) -> None:
        if self._bars:
            self._live.stop()

    def _say_once(self, step: LoadProgress) -> None:
        quarter = int(step.fraction * 4)
        if (step.weights, step.stage, quarter) not in self._said:
            self._said.add((step.weights, step.stage, quarter))
            self._say(f"{step.stage}: {step.fraction:.0%}")

    def _say(self, line: str) -> None:
        if self._config.log_format == "json":
            log.info(line)
            return
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def who_is_let_in(config: Config) -> str:
    if not checks_keys(config):
        if is_loopback(config.host):
            return "keys: any is let in, since only this machine can connect; see openrl keys"
        return "keys: ANY is let in, from anywhere: auth.mode is any-key"
    count = len(read_keys(config))
    if not count:
        return "keys: nobody has one yet; make one with openrl keys add"
    return f"keys: {count} {'is' if count == 1 else 'are'} listed, and no others are let in"


def warn_of_keyless(config: Config, owners: Iterable[OwnerId]) -> None:
    """Data that nobody can reach any more is named, so that it does not vanish unseen."""
    if not checks_keys(config):
        return
    known = {entry.owner for entry in read_keys(config)} | {unlisted_owner(config.admin_key)}
    if keyless := sorted(set(owners) - known):
        log.warning(
            "%d owners have data here and no key: %s%s; `openrl keys add --owner NAME` makes one, "
            "or `--was KEY` with the key that was used before",
            len(keyless),
            ", ".join(keyless[:_NAMED]),
            " ..." if len(keyless) > _NAMED else "",
        )


def _facts(info: BaseModelInfo) -> str:
    return (
        f"{info.architecture}, context {info.context_length}, vocabulary {info.vocab_size}, "
        f"LoRA rank up to {info.max_lora_rank}"
    )


def _table(infos: Sequence[BaseModelInfo]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("model", "architecture", "context", "vocabulary", "LoRA rank up to"):
        table.add_column(title)
    for info in infos:
        numbers = (info.context_length, info.vocab_size, info.max_lora_rank)
        table.add_row(info.name, info.architecture, *(str(number) for number in numbers))
    return table
