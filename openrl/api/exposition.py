"""The node's figures as Prometheus' families: `openrl_`, base units, `_total` on counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from openrl.api.services import Services
from openrl.engines.base import Capacity
from openrl.journal import JournalStatistics
from openrl.scheduler.core.tallies import PassTally, Tallies, Tally


class NodeCollector(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def describe(self) -> Iterable[Metric]:
        """Nothing is read before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._bases()
        yield from _passes(self._services.enquiries.tallies())
        yield from self._requests()
        yield from self._memory()
        yield from self._waiting_room()

    def _engine(self) -> Iterator[Metric]:
        counters = self._services.enquiries.statistics()
        build = GaugeMetricFamily("openrl_build_info", "Always 1.", labels=["version"])
        build.add_metric([version("openrl-node")], 1)
        yield build
        yield _gauge("openrl_engine_ready", "1 once weights are loaded.", counters.engine_ready)
        yield CounterMetricFamily(
            "openrl_engine_idle_runnable_seconds",
            "Time in which the engine computed nothing although accepted work could have run.",
            counters.idle_runnable_seconds,
        )
        yield _gauge("openrl_lanes", "Models and samplers in the scheduler.", counters.lanes)
        rows = GaugeMetricFamily("openrl_rows", "Sequences being sampled.", labels=["state"])
        rows.add_metric(["running"], counters.rows_running)
        rows.add_metric(["preempted"], counters.rows_preempted)
        yield rows
        waiting = GaugeMetricFamily(
            "openrl_requests", "Accepted and not answered.", labels=["state"]
        )
        waiting.add_metric(["waiting"], counters.requests_waiting)
        waiting.add_metric(["running"], counters.requests_running)
        yield waiting

    def _requests(self) -> Iterator[Metric]:
        answered = CounterMetricFamily(
            "openrl_requests_answered", "Accepted and answered.", labels=["kind", "outcome"]
        )
        for (kind, well), count in sorted(self._services.meter.answered.items()):
            answered.add_metric([kind, "ok" if well else "failed"], count)
        yield answered
        waits = self._services.enquiries.tallies().waits
        yield _histogram(
            "openrl_queue_wait_seconds",
            "From acceptance to the first pass that serves the request.",
            ((kind, tally) for kind, tally in sorted(waits.items())),
        )

    def _bases(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "openrl_base_model_ready", "1 once its weights are loaded.", labels=["base_model"]
        )
        for each in self._services.status():
            states.add_metric([each.name], each.state == "ready")
        yield states

    def _memory(self) -> Iterator[Metric]:
        memory = self._services.enquiries.memory()
        yield from _room(memory.capacity or Capacity(0, 0, 0, 0, 0, 0, 0))
        yield _gauge("openrl_models", "Models that are alive.", sum(memory.models.values()))
        pinned = sum(memory.pinned_bytes.values())
        yield _gauge("openrl_pinned_versions_bytes", "Held for unnamed samplers.", pinned)
        queued = sum(memory.queued_bytes.values())
        yield _gauge("openrl_queued_payload_bytes", "Of requests not answered.", queued)

    def _waiting_room(self) -> Iterator[Metric]:
        waiting, kept = self._services.futures.counts()
        futures = GaugeMetricFamily(
            "openrl_futures", "Results that are waited for, and that can be had.", labels=["state"]
        )
        futures.add_metric(["waiting"], waiting)
        futures.add_metric(["resolved"], kept)
        yield futures
        yield from _journal(self._services.journal.statistics())


def _journal(told: JournalStatistics) -> Iterator[Metric]:
    """How far the disk is behind, and how large it is: all 0 when nothing is journalled."""
    yield _gauge(
        "openrl_journal_unflushed_bytes", "Appended, and not durable yet.", told.unflushed_bytes
    )
    yield _gauge("openrl_journal_size_bytes", "On the disk.", told.bytes)
    yield _gauge("openrl_journal_live_bytes", "On the disk, and needed.", told.live_bytes)
    yield _gauge("openrl_journal_segments", "Files of the journal.", told.segments)
    yield CounterMetricFamily("openrl_journal_records", "Appended.", told.appended)
    yield CounterMetricFamily("openrl_journal_fsyncs", "Group commits.", told.fsyncs)
    yield _gauge(
        "openrl_journal_last_fsync_seconds", "How long the last one took.", told.last_fsync_seconds
    )
    yield _gauge(
        "openrl_journal_trouble",
        "1 while nothing can be made durable.",
        told.trouble is not None,
    )


def _room(capacity: Capacity) -> Iterator[Metric]:
    """As the engine said after its last pass; all 0 before its first word."""
    tokens = GaugeMetricFamily(
        "openrl_kv_cache_tokens", "Room for keys and values, in tokens.", labels=["state"]
    )
    used = capacity.kv_blocks_total - capacity.kv_blocks_free
    tokens.add_metric(["used"], used * capacity.block_tokens)
    tokens.add_metric(["free"], capacity.kv_blocks_free * capacity.block_tokens)
    yield tokens
    slots = GaugeMetricFamily(
        "openrl_adapters",
        "Models' adapters, in the device's memory or paged out.",
        labels=["state"],
    )
    slots.add_metric(["in_memory"], capacity.slots_used)
    slots.add_metric(["paged_out"], capacity.slots_total - capacity.slots_used)
    yield slots
    yield _gauge(
        "openrl_engine_headroom_bytes",
        "Left for gradients and activations.",
        capacity.headroom_bytes,
    )


def _passes(tallies: Tallies) -> Iterator[Metric]:
    kinds = sorted(tallies.passes.items())
    busy = CounterMetricFamily(
        "openrl_engine_busy_seconds", "Measured engine time.", labels=["kind"]
    )
    tokens = CounterMetricFamily(
        "openrl_tokens", "Trained (train) and read or sampled (sample).", labels=["kind"]
    )
    for kind, tally in kinds:
        busy.add_metric([kind], tally.seconds.total)
        tokens.add_metric([kind], tally.tokens.total)
    yield busy
    yield tokens

    def family(name: str, text: str, pick: Callable[[PassTally], Tally]) -> Metric:
        return _histogram(name, text, ((kind, pick(tally)) for kind, tally in kinds))

    yield family("openrl_pass_duration_seconds", "Engine time of a pass.", lambda t: t.seconds)
    yield family("openrl_pass_tokens", "Tokens of a pass.", lambda t: t.tokens)
    yield family(
        "openrl_pass_jobs", "Models and samplers that share a pass: coalescing.", lambda t: t.jobs
    )
    yield family("openrl_pass_requests", "Requests with a part in a pass.", lambda t: t.requests)
    trained = ((kind, tally.filled) for kind, tally in kinds if kind == "train")
    yield _histogram(
        "openrl_pass_fill_ratio", "Tokens of a training pass over scheduler.pass_tokens.", trained
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _histogram(name: str, text: str, tallies: Iterable[tuple[str, Tally]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["kind"])
    for kind, tally in tallies:
        bounds = [*map(floatToGoString, tally.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(tally.counts)), strict=True))
        family.add_metric([kind], buckets, tally.total)
    return family
