"""How many threads the engine computes with, and how they wait, settled before torch is imported.

OpenMP reads its variables when its library is loaded, which `import torch` does: setting them in
this process before that is enough. Starting the process anew with another environment would
double the start-up and change what a supervisor sees.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from openrl.config import Config

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "max 100000" or "150000 100000"


def settle(config: Config, environ: MutableMapping[str, str]) -> Config:
    """`config` with its thread count chosen; writes OpenMP's variables into `environ`."""
    if "torch" in sys.modules:
        raise AssertionError("threads are settled before torch is imported")
    threads = config.engine.threads or usable_cores()
    environ["OMP_NUM_THREADS"] = environ["MKL_NUM_THREADS"] = str(threads)
    environ["OMP_WAIT_POLICY"] = config.engine.wait_policy.upper()
    return replace(config, engine=replace(config.engine, threads=threads))


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Physical cores that this process may run on, within its container's quota; at least 1.

    Two threads of one core share its arithmetic units, so a second one adds nothing to a GEMM.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:  # macOS and Windows
        return os.cpu_count() or 1
    cores = {_siblings(cpus, cpu) for cpu in allowed}
    return max(1, min(len(cores), _whole_cpus(quota)))


def _siblings(cpus: Path, cpu: int) -> str:
    """The logical CPUs on the core of `cpu`; itself where the kernel does not say."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _whole_cpus(quota: Path) -> int:
    """The quota rounded down; a thread that is throttled holds up all that wait for it."""
    try:
        allowed, period = quota.read_text().split()
        return int(allowed) // int(period)
    except (OSError, ValueError):
        return sys.maxsize
