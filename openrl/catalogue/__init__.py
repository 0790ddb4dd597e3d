"""Names and ledgers, in one SQLite file: see `catalogue`."""

from openrl.catalogue.catalogue import Catalogue
from openrl.catalogue.flushing import Flushing
from openrl.catalogue.records import Checkpoint, Mark, Page, Run, Sampler, Session

__all__ = ["Catalogue", "Checkpoint", "Flushing", "Mark", "Page", "Run", "Sampler", "Session"]
