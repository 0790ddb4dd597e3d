"""Writes docs/configuration.md from openrl/config.py: `python docs/generate.py`.

A test holds the page to the code, and every key to a line below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from openrl.config import Config, expected, known_keys

PAGE = Path(__file__).parent / "configuration.md"

MEANINGS: Mapping[str, str] = {
    "server.host": "Address to listen at. Anything but loopback should wait for real keys.",
    "server.port": "Port to listen at; 0 takes a free one.",
    "server.data": "Where checkpoints and the catalogue of names are kept.",
    "server.home": "The logical name of this node's catalogue. One node needs no other.",
    "server.public_url": "How others reach this server, say `https://host/prefix`: what links to "
    "files begin with. When left out, as the caller reached it.",
    "server.issue_jwts": "Exchange keys for identities that are good for an hour, so that "
    "`whoami` of the SDK works.",
    "server.poll_seconds": 'How long a poll is held before the answer is "still pending". '
    "The SDK reads for 45 s.",
    "server.retention_seconds": "How long a result can be fetched again after it is there.",
    "server.drain_seconds": "How long SIGTERM waits for accepted work to end.",
    "server.log_level": "The least serious message that is logged.",
    "server.log_format": "Lines for people, or one JSON object a line.",
    "engine.kind": "`fake` computes nothing real: it is for tests of clients and of the wire.",
    "engine.process": "`child`: the torch engine runs in a process of its own. `thread`: on a "
    "thread of the server's, where its Python makes answers slower. See [decisions](decisions.md).",
    "engine.device": "`auto` takes CUDA, then MPS, then the CPU.",
    "engine.dtype": "Of the base weights; adapters are always fp32. `auto` fits the device.",
    "engine.threads": "CPU threads; when left out, the physical cores within the container's "
    "quota. `OMP_NUM_THREADS` is read too, with the least weight.",
    "engine.wait_policy": "How OpenMP's threads wait. Active ones spin, which slows everything "
    "else on the machine.",
    "engine.max_lora_rank": "The highest rank that `create_model` accepts.",
    "engine.kv_cache_bytes": "Memory for the keys and values of sequences being sampled.",
    "engine.max_rows": "How many sequences may be sampled at once.",
    "engine.sampled_logprobs": "`tempered`: at the request's temperature. `raw`: at temperature 1 "
    "always. See [sampling](sampling.md).",
    "scheduler.quantum_seconds": "The longest that one pass should hold the engine.",
    "scheduler.gap_seconds": "How long a model's operations wait for a missing seq_id.",
    "scheduler.pass_tokens": "The most training tokens in one pass.",
    "scheduler.atom_tokens": "The size at which a request is cut into pieces that other work may "
    "run between. A datum is never cut.",
    "scheduler.decode_steps": "The most tokens of each sequence in one decode slice.",
    "scheduler.max_queued_samples": "Samples that one owner may have waiting; over it, 429.",
    "scheduler.max_queued_bytes": "Bytes that one owner may have waiting; over it, 429.",
    "scheduler.owner_weights": "Shares of the engine by owner; 1 for those not named.",
    "limits.body_bytes": "The largest body of a request, decompressed.",
    "limits.datums": "Datums in one request.",
    "limits.num_samples": "Samples in one request.",
    "limits.id_chars": "Characters of an id.",
    "limits.metadata_bytes": "The size of `user_metadata`.",
    "limits.topk_prompt_logprobs": "The highest k.",
    "limits.tensor_elements": "Elements of all tensors of one request, once dense.",
}

HEAD = """\
<!-- Written by docs/generate.py. Change openrl/config.py or the script, not this page. -->
# Configuration

`openrl config show` prints every setting in force and where it was set; `openrl config check`
says what is wrong. An unknown key is an error that names it.

Each setting can be given in four ways. The first of these wins:

1. a flag of `openrl serve`: `--port 8080` (see `openrl serve --help`; not every key has one);
2. the environment: `OPENRL_SERVER__PORT=8080` (section and name with two underscores between);
3. a TOML file, named by `--config FILE` or `OPENRL_CONFIG`;
4. the default below.

```toml
[models]
"Qwen/Qwen3-4B" = "/models/qwen3-4b"     # a public name and a local directory
"Qwen/Qwen3-8B" = {}                     # from the hub's cache or the hub

[server]
port = 8080

[engine]
device = "cuda:0"

[scheduler]
quantum_seconds = 0.1
```

Models are also `--model NAME=PATH` or `--model NAME`, as often as you like, and
`OPENRL_MODELS="NAME=PATH,NAME"`. Several names may share one directory, whose weights are then
loaded once. Relative paths in a file are taken from the file's directory.
"""


def page() -> str:
    return "\n".join([HEAD, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    section = ""
    for key, hint in known_keys().items():
        if not key.startswith(f"{section}."):
            section = key.partition(".")[0]
            yield f"\n## `[{section}]`\n"
            yield "| key | takes | default | |"
            yield "|---|---|---|---|"
        name = key.removeprefix(f"{section}.")
        yield f"| `{name}` | {expected(hint)} | {_default(key)} | {MEANINGS[key]} |"


def _default(key: str) -> str:
    section, name = key.split(".")
    config = Config(models=())
    value = getattr(config if section == "server" else getattr(config, section), name)
    if value is None:
        return "chosen at start"
    if isinstance(value, int):
        return f"`{value:_}`"
    return f"`{value}`" if value != {} else "none"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
