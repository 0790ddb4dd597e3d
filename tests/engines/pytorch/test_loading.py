"""Loading takes the memory of the weights once: no second copy, and small checks beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHARD = 8 << 20
_ROWS = 256
"""What the checks at load may take, as rows of a training pass without recomputing."""

_CHILD = """
import json, re, sys
from pathlib import Path
from openrl.config import EngineConfig, ModelSource
from openrl.engines.pytorch.engine import TorchEngine

def private():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def load(directory):
    config = EngineConfig(device="cpu", dtype=sys.argv[1], threads=1, kv_cache_bytes=1 << 20)
    engine = TorchEngine(config, [ModelSource("base", Path(directory))])
    engine.load(lambda progress: None)
    return engine

load(sys.argv[2])  # what libraries take at their first use
before = private()
# The process keeps what it has freed (`heap.py`): what it has in the end is its peak.
(base,) = [served.base for served in load(sys.argv[3])._served.values()]
weights = {p.data_ptr(): p.nbytes for p in base._model.parameters()}
print(json.dumps([private() - before, sum(weights.values()), base.row_bytes]))
"""


def _save(directory: Path, hidden: int, layers: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=SHARD)
    return directory


def _measured(warm: Path, large: Path) -> list[int]:
    """In a process of its own: bytes that loading added, of the weights, of a row."""
    said = subprocess.run(
        [sys.executable, "-c", _CHILD, "float32", str(warm), str(large)],
        check=True,
        capture_output=True,
        text=True,
    )
    return list(json.loads(said.stdout.splitlines()[-1]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_the_weights_memory_once(tmp_path: Path) -> None:
    """A sharded bfloat16 checkpoint with a tied head, made float32 on the way."""
    warm, large = _save(tmp_path / "warm", 64, 2), _save(tmp_path / "large", 512, 5)
    assert len(list(large.glob("*.safetensors"))) > 3
    # What the allocator keeps for itself differs by some MiB, and only adds: the least counts.
    measured = [_measured(warm, large) for _ in range(3)]
    grown, weights, row_bytes = min(measured)
    assert weights > 64 << 20
    allowed = _ROWS * row_bytes + SHARD
    assert allowed < weights  # or a second copy would go unseen
    assert grown < weights + allowed, (grown >> 20, weights >> 20, allowed >> 20)
