"""Keys and values of prompts that were computed before, in chunks of `BLOCK_TOKENS` tokens.

A chunk's key is a digest of the version and of all tokens up to the chunk's end, so that
nothing is ever shared between weights. A prompt is always cut into the same chunks, and so a
cached chunk holds the very bits that computing it again would give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from openrl.engines.pytorch.kvcache import BLOCK_TOKENS, KVMemory
from openrl.types import VersionId

_SHARE = 0.5  # of the budget: the rest belongs to rows


def chunk_keys(version: VersionId | None, prompt: NDArray[np.int32]) -> tuple[bytes, ...]:
    """One key per full chunk that may be shared: the last token is never part of one, since
    its hidden state is needed."""
    chain = blake2b(b"plain" if version is None else b"v" + version.encode(), digest_size=16)
    tokens = np.ascontiguousarray(prompt, dtype=np.int32)
    keys = []
    for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        chain.update(tokens[end - BLOCK_TOKENS : end].tobytes())
        keys.append(chain.digest())
    return tuple(keys)


class PrefixCache:
    """Least recently used chunks go first, and the ends of a prompt before its beginning."""

    def __init__(self, memory: KVMemory[Any]) -> None:
        self._memory = memory
        self._chunks: OrderedDict[bytes, Tensor] = OrderedDict()
        self._versions: dict[VersionId | None, set[bytes]] = {}
        self._version_of: dict[bytes, VersionId | None] = {}
        memory.reclaim = self.reclaim

    @property
    def tokens(self) -> int:
        return len(self._chunks) * BLOCK_TOKENS

    def hits(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first chunks are here."""
        for count, key in enumerate(keys):
            if key not in self._chunks:
                return count
        return len(keys)

    def fetch(self, keys: Sequence[bytes], staged: Tensor) -> None:
        """Copies chunks, all of them present, to the front of `staged` [layers, 2, kv_heads,
        capacity, head_dim]."""
        for i, key in enumerate(keys):
            staged[:, :, :, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS] = self._chunks[key]
        self._touch(keys)

    def store(self, version: VersionId | None, keys: Sequence[bytes], staged: Tensor) -> None:
        """Keeps copies of a finished prompt's chunks, as far as there is room."""
        self._touch(keys)
        for i, key in enumerate(keys):
            if key in self._chunks:
                continue
            if self.tokens + BLOCK_TOKENS > _SHARE * self._memory.total:
                return
            if self._memory.unallocated < BLOCK_TOKENS:
                return
            self._memory.reserve(BLOCK_TOKENS)
            part = staged[:, :, :, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            self._chunks[key] = part.clone()
            self._version_of[key] = version
            self._versions.setdefault(version, set()).add(key)
        self._touch(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def forget(self, version: VersionId) -> None:
        for key in list(self._versions.get(version, ())):
            self._evict(key)

    def reclaim(self, tokens: int) -> None:
        for _ in range(-(-tokens // BLOCK_TOKENS)):
            if not self._chunks:
                return
            self._evict(next(iter(self._chunks)))

    def _evict(self, key: bytes) -> None:
        del self._chunks[key]
        version = self._version_of.pop(key)
        self._versions[version].discard(key)
        if not self._versions[version]:
            del self._versions[version]
        self._memory.unreserve(BLOCK_TOKENS)
