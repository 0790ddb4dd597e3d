"""The parts of the shell, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from openrl.actors import EngineThread, Tasks
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.config import JournalConfig, SchedulerConfig
from openrl.engines.base import Engine, LoadProgress
from openrl.futures import Futures
from openrl.journal import Journal, NullJournal
from openrl.scheduler.allowance import Allowances
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.completion import Completion
from openrl.scheduler.controls import Controls
from openrl.scheduler.core.state import State
from openrl.scheduler.enquiries import Enquiries
from openrl.scheduler.entitlements import Entitlements
from openrl.scheduler.leases import Leases
from openrl.scheduler.loading import Loading
from openrl.scheduler.metering import Meter
from openrl.scheduler.models import Models
from openrl.scheduler.pins import Pins
from openrl.scheduler.rhythm import Rhythm
from openrl.scheduler.runner import Runner
from openrl.scheduler.snapshots import Snapshots


class Parts:
    """`keeps`: what is accepted outlives the process."""

    def __init__(
        self,
        engine: Engine,
        config: SchedulerConfig,
        catalogue: Catalogue,
        store: CheckpointStore,
        futures: Futures,
        journal: Journal,
        clock: Callable[[], float],
        now: Callable[[], float],
        on_progress: Callable[[LoadProgress], None],
        snapshots: Path | None,
        securing: JournalConfig,
        task_died: Callable[[str, BaseException], None],
    ) -> None:
        self.engine = engine
        self.config = config
        self.catalogue = catalogue
        self.futures = futures
        self.journal = journal
        self.clock = clock
        self.keeps = not isinstance(journal, NullJournal)
        self.thread = EngineThread()
        self.tasks = Tasks(task_died)
        self.models = Models(Pins(config.pinned_versions, config.pinned_bytes))
        self.backlog = Backlog(clock)
        self.entitlements = Entitlements(config)
        self.state = State(replace(config, owner_weights=self.entitlements.weights()))
        self.loading = Loading(on_progress)
        self.allowances = Allowances(self.entitlements.rate)
        self.meter = Meter(catalogue.usage, self.models, now)
        # Half of the journal may wait for snapshots; the rest is answers and room for cleaning.
        rhythm = Rhythm(securing.replay_seconds, securing.max_bytes // 2)
        self.snapshots = Snapshots(snapshots, journal, rhythm, self.models.pins, self.tasks)
        self.completion = Completion(
            futures, journal, catalogue.flushing, self.tasks, self.meter, self.snapshots
        )
        self.controls = Controls(self.models, catalogue, store, now)
        self.runner = Runner(
            engine,
            self.thread,
            self.models,
            self.backlog,
            self.controls,
            journal,
            self.snapshots,
            clock,
            self.loading.failure_of,
        )
        self.leases = Leases(self.runner.execute, self.models, self.backlog, self.tasks)
        self.enquiries = Enquiries(
            self.state,
            self.allowances,
            self.loading,
            self.models,
            self.backlog,
            clock,
            lambda: journal.trouble,
        )
