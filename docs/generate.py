"""Writes docs/configuration.md from openrl/config.py, and the table of routes in docs/http.md from
the routers of openrl/api: `python docs/generate.py`.

Tests hold both to the code, every key to a line below, and every route to a line below or a
docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from aiohttp import web

from openrl.api.app import GROUPS, Services
from openrl.config import Config, expected, known_keys

PAGE = Path(__file__).parent / "configuration.md"
HTTP_PAGE = Path(__file__).parent / "http.md"

MEANINGS: Mapping[str, str] = {
    "server.host": "Address to listen at. Anything but loopback needs [keys](keys.md).",
    "server.port": "Port to listen at; 0 takes a free one.",
    "server.data": "Where checkpoints and the catalogue of names are kept.",
    "server.home": "The logical name of this node's catalogue. One node needs no other.",
    "server.public_url": "How others reach this server, say `https://host/prefix`: what links to "
    "files begin with. When left out, as the caller reached it.",
    "server.tls_cert": "A certificate with its chain, in PEM: HTTPS instead of HTTP. See "
    "[keys and trust](keys.md#tls).",
    "server.tls_key": "The certificate's key, when it is in a file of its own.",
    "server.issue_jwts": "Exchange keys for identities that are good for an hour, so that "
    "`whoami` of the SDK works.",
    "server.poll_seconds": 'How long a poll is held before the answer is "still pending". '
    "The SDK reads for 45 s.",
    "server.retention_seconds": "How long a result can be fetched again after it is there.",
    "server.drain_seconds": "How long SIGTERM waits for accepted work to end.",
    "server.silence_seconds": "After how long without a heartbeat a client's samples are taken "
    "back, if it ever sent one. Training work runs.",
    "server.admin_key": "An administrator's `X-API-Key` that is good on the server's own machine "
    "alone; see [keys and trust](keys.md#administrators). Empty: there is none.",
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
    "engine.adapter_bytes": "Memory on the device for adapters with optimizers and gradients; idle "
    "ones beyond it move away and come back unseen. When left out, a quarter of what is free.",
    "engine.adapter_host_bytes": "Memory of the host for idle adapters of a device that has its "
    "own; beyond it they go to disk.",
    "engine.kv_cache_bytes": "Memory for the keys and values of sequences being sampled.",
    "engine.idle_versions": "Sets of sampler weights that stay in memory while nobody samples "
    "from them; further ones are on disk.",
    "engine.max_rows": "How many sequences may be sampled at once.",
    "engine.sampled_logprobs": "`tempered`: at the request's temperature. `raw`: at temperature 1 "
    "always. See [sampling](sampling.md).",
    "scheduler.quantum_seconds": "The longest that one pass should hold the engine.",
    "scheduler.hold_seconds": "The longest that an otherwise idle engine waits for models that "
    "are about to send; 0 never waits.",
    "scheduler.gap_seconds": "How long a model's operations wait for a missing seq_id.",
    "scheduler.pass_tokens": "The most training tokens in one pass.",
    "scheduler.atom_tokens": "The size at which a request is cut into pieces that other work may "
    "run between. A datum is never cut.",
    "scheduler.decode_steps": "The most tokens of each sequence in one decode slice.",
    "scheduler.max_queued_samples": "Samples that one owner may have waiting; over it, 429.",
    "scheduler.max_queued_bytes": "Bytes that one owner may have waiting; over it, training work "
    "is held for up to 50 s before 429.",
    "scheduler.pinned_versions": "Unnamed samplers kept for one owner; the oldest go first.",
    "scheduler.pinned_bytes": "Bytes of unnamed samplers that are kept for one owner.",
    "scheduler.max_queued_requests": "Requests of any kind that one owner may have waiting; over "
    "it, samples get 429 and training work is held.",
    "scheduler.full_models": "Models that train all parameters, not an adapter, which one owner "
    "may have in memory at once; 0 is none. See [full-parameter training](full.md).",
    "scheduler.max_models": "Models that one owner may have in memory at once; 0 is no bound.",
    "scheduler.tokens_per_minute": "Tokens that one owner may train and sample in a minute; what "
    "is over waits, and its polls say so. 0 is no bound.",
    "scheduler.owner_weights": "Shares of the engine by owner; 1 for those not named.",
    "scheduler.owners": "What one owner may have instead of what all may: "
    "`[scheduler.owners.alice]`, then `max_models = 2`. See "
    "[scheduling](scheduling.md#bounds-for-one-owner).",
    "scheduler.sharing": "`separate` and `in_turn` are for comparisons: a pass of one model's work "
    "alone; and one owner's queue after the other's. Both are slower.",
    "auth.mode": "`keys`: only keys that are listed. `any-key`: every key is an owner of its own. "
    "`auto`: keys if there are any, else any key on loopback, else no start. See "
    "[keys and trust](keys.md).",
    "auth.keys_file": "The list of keys, as `openrl keys` writes it. When left out, `keys` in the "
    "data directory.",
    "auth.keys": "One more key, or its hash, for each owner named: for what comes from the "
    'environment, `OPENRL_AUTH__KEYS="alice=tml-...,bob=sha256:..."`.',
    "limits.body_bytes": "The largest body of a request, decompressed.",
    "limits.body_bytes_per_second": "A body that comes slower than this, after the first "
    "`body_seconds`, is cut with 408.",
    "limits.body_seconds": "What every body is granted before its pace is judged.",
    "limits.header_seconds": "Within which the head of a request must be there; the connection is "
    "cut with 408.",
    "limits.open_bodies_bytes": "Bytes of bodies that one owner may be sending at once; what is "
    "over gets 429.",
    "limits.open_polls": "Polls that one owner may have open at once; what is over gets 429.",
    "limits.request_tokens": "Tokens in one request.",
    "limits.datums": "Datums in one request.",
    "limits.num_samples": "Samples in one request.",
    "limits.id_chars": "Characters of an id.",
    "limits.metadata_bytes": "The size of `user_metadata`.",
    "limits.topk_prompt_logprobs": "The highest k.",
    "limits.topk_sample_logprobs": "The highest k, for sampled tokens.",
    "limits.tensor_elements": "Elements of all tensors of one request, once dense.",
    "journal.enabled": "Keep accepted training work, so that it survives the end of the process. "
    "See [durability](durability.md).",
    "journal.segment_bytes": "The size at which the journal begins another file.",
    "journal.max_bytes": "How large the journal may be; above it new training work is refused "
    "until snapshots have made room.",
    "journal.replay_seconds": "How many seconds of training a restart may have to do again: the "
    "less, the more snapshots are taken.",
    "checkpoints.url": "Where checkpoints are kept besides the data directory: "
    "`gs://bucket/prefix`, `s3://bucket/prefix`, `file:///shared`, or what else fsspec knows.",
    "checkpoints.cache_bytes": "With a url, how much of them stays on this disk as well.",
    "checkpoints.owner_bytes": "What one owner may keep; 0 is no bound. A save beyond it fails and "
    "says so.",
    "checkpoints.owner_count": "How many checkpoints one owner may keep; 0 is no bound.",
    "metrics.access": "Who may read `/metrics` besides this machine and who has the key below. See "
    "[observability](observability.md).",
    "metrics.key": "A key that opens `/metrics` from elsewhere, and nothing else.",
    "traces.endpoint": "Where OpenTelemetry spans go over OTLP/HTTP, say "
    "`http://127.0.0.1:4318/v1/traces`; empty: there are none. Needs the extra `otel`.",
    "cluster.node": "This node's name, and that of its home: see [many nodes](cluster.md). It "
    "stays with the data directory. Empty: a node by itself.",
    "cluster.address": "The URL by which the other nodes reach this one.",
    "cluster.peers": "URLs of the nodes with commas between. Each host stands for all of its "
    "addresses, so that a headless Service is one URL. This node's own may be among them.",
    "cluster.secret": "What the nodes sign with, the same on all of them.",
    "cluster.refresh_seconds": "How often the others are asked how they are.",
    "cluster.away_seconds": "After how long without an answer a node counts as away.",
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
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return f"`{value:_}`"
    return f"`{value}`" if value != {} else "none"


# --- routes -----------------------------------------------------------------------------------

ROUTES: Mapping[str, str] = {
    "GET /healthz": "The process is alive. Needs no key.",
    "GET /readyz": "The door is open; how far each model has been loaded or why it failed, and how "
    "many seconds the engine has worked. 503 when nothing can run. Needs no key.",
    "POST client/config": "Flags for the SDK, by its version.",
    "POST client/dynamic_config": "Flags that the SDK asks for again every few minutes.",
    "GET get_server_capabilities": "The models served, with their context lengths.",
    "POST telemetry": "Accepted and dropped.",
    "POST auth/token": "A key for an identity that is good for an hour (`server.issue_jwts`).",
    "GET auth/apikey/me": "What is known of the caller's key.",
    "DELETE auth/apikey/me": "Refused: keys are not deleted over HTTP.",
    "GET audit": "The caller's own log of one UTC day.",
    "GET billing/usage/events": "Tokens and engine time by the hour; nothing has a price.",
    "GET billing/usage/checkpoints/current": "What the caller's checkpoints take, by project.",
    "POST create_session": "Begins a session: every model and sampler belongs to one.",
    "POST session_heartbeat": "The client is alive. 410 once the session is finished.",
    "POST sessions/{session_id}/finish": "Ends the session and frees what it holds in memory.",
    "GET sessions": "The caller's sessions, newest first.",
    "GET sessions/{session_id}": "Its models and samplers.",
    "POST sessions/search": "The caller's sessions by name, tag, project and time.",
    "PUT sessions/{session_id}/project": "Puts a session under a project's name.",
    "GET sessions/{session_id}/trace_export": "Says that there is no timeline to export.",
    "POST create_model": "Begins a training run: a fresh LoRA adapter on a base model, or "
    "without `lora_config` [all its parameters](full.md). *",
    "POST get_info": "A model's base, rank, architecture and tokenizer.",
    "POST forward_backward": "Log-probabilities and loss; adds to the gradient. *",
    "POST forward": "The same without gradients, for SDKs before 0.25. *",
    "POST optim_step": "One step of AdamW with what has been accumulated. *",
    "POST save_weights": "A named checkpoint with the optimizer's state. *",
    "POST save_weights_for_sampler": "A sampler's weights, named or for this session alone. *",
    "POST save_weights_external": "Weights for use elsewhere, encrypted when asked. *",
    "POST load_weights": "A checkpoint's weights into a model, or a new model of them. *",
    "POST unload_model": "Frees a model's memory. *",
    "POST create_sampling_session": "A sampler of a base model or of a checkpoint.",
    "POST join_sampling_session": "Numbers for another client of the same sampler.",
    "GET samplers/{sampler_id}": "What a sampler samples from.",
    "POST asample": "Samples, with log-probabilities of prompt and answer on request. *",
    "POST retrieve_future": "A long poll for the result of a request marked *.",
    "POST cancel_future": "Takes a request back.",
    "GET training_runs": "The caller's runs; with `access_scope=accessible`, published ones too.",
    "GET training_runs/{run}": "One run and its last checkpoints.",
    "GET training_runs/{run}/checkpoints": "All checkpoints of a run.",
    "DELETE training_runs/{run}/checkpoints/{kind}/{name}": "Deletes a checkpoint.",
    "PUT training_runs/{run}/checkpoints/{kind}/{name}/ttl": "When it expires; null is never.",
    "POST training_runs/{run}/checkpoints/{kind}/{name}/publish": "Lets every key read it.",
    "DELETE training_runs/{run}/checkpoints/{kind}/{name}/publish": "Takes that back.",
    "GET training_runs/{run}/checkpoints/{kind}/{name}/archive": "A signed link to one file with "
    "all of it.",
    "GET training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": "Signed links to "
    "the files of weights for use elsewhere.",
    "GET checkpoints": "All checkpoints of the caller, newest first.",
    "POST weights_info": "Base model, rank and coverage of a checkpoint.",
    "POST copy_weights": "A checkpoint as a run of its own; the files are shared.",
    "GET /oai/api/v1/models": "For OpenAI's clients: base models and sampler checkpoints.",
    "POST /oai/api/v1/completions": "For OpenAI's clients: text goes on.",
    "POST /anthropic/api/v1/messages": "For Anthropic's clients: the model's own chat template.",
    "POST /anthropic/api/v1/messages/count_tokens": "How many tokens the same prompt has.",
    "POST /oai/api/v1/chat/completions": "For OpenAI's clients: the model's own chat template.",
}
"""Without `/api/v1/`. A route that is not here is described by its handler's docstring."""

TABLE = re.compile(r"(?<=<!-- routes -->\n).*(?=<!-- end of routes -->)", re.DOTALL)


def http_page(text: str) -> str:
    """The page with its table of routes made anew."""
    return TABLE.sub(lambda _: routes_table(), text)


def routes_table() -> str:
    rows = (f"| `{method}` | `{path}` | {meaning} |\n" for method, path, meaning in routes())
    return "".join(["| | route | |\n", "|---|---|---|\n", *rows])


def routes() -> Iterator[tuple[str, str, str]]:
    """Method, path and meaning, in the order in which the groups name them."""
    for group in GROUPS:
        for route in group(cast(Services, None)).routes():  # kept, and not used before a request
            path = re.sub(r"{(\w+):([^}]*)}", r"{\1}", route.path).removeprefix("/api/v1/")
            if path not in ("healthz", "readyz"):  # the same as those above /api/v1
                yield route.method, path, ROUTES.get(f"{route.method} {path}") or said_by(route)


def said_by(route: web.RouteDef) -> str:
    """The first sentence of the handler's docstring. Raises `ValueError` without one."""
    text = " ".join((inspect.getdoc(route.handler) or "").split())
    if not text:
        raise ValueError(
            f"{route.method} {route.path} has neither a line in ROUTES nor a docstring"
        )
    return re.split(r"(?<=\.) ", text)[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    HTTP_PAGE.write_text(http_page(HTTP_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
