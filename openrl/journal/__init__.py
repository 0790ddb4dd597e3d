"""What makes accepted training work survive the process: told before an answer, read at start."""

from __future__ import annotations

from openrl.journal.disk import DiskJournal
from openrl.journal.protocol import Flushed, Journal, JournalStatistics, NullJournal
from openrl.journal.recovered import NOTHING, Answer, Executed, Recovered, RecoveredModel, Snapshot

__all__ = [
    "NOTHING",
    "Answer",
    "DiskJournal",
    "Executed",
    "Flushed",
    "Journal",
    "JournalStatistics",
    "NullJournal",
    "Recovered",
    "RecoveredModel",
    "Snapshot",
]
