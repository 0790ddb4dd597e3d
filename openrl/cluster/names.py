"""What an id says of where its work is.

A session's id begins with its home, the node that made it: `{home}-{uuid}`. A model is
`{session}:train:{n}`, since clients make that name themselves: only its home knows who serves it.
The ids that a node makes say it: where that node is not the home, a sampling session is
`{session}:sample:{n}@{node}`, and on the wire a request of a model is `{model}:{seq}@{node}`.
"""

from __future__ import annotations

import re

_SESSION = re.compile(
    r"(?P<home>[a-z0-9][a-z0-9.-]*?)-"
    r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|copy-[0-9a-f]{32}|direct-.+)"
)
_WORK = re.compile(r":(?:train|sample):")
_NODE = re.compile(r"@(?P<node>[a-z0-9][a-z0-9.-]*)")


def session_of(name: str) -> str:
    """Of a session, model, sampling session or request."""
    return _WORK.split(name, maxsplit=1)[0]


def home_of(name: str) -> str | None:
    """None for what no node has made."""
    found = _SESSION.fullmatch(session_of(name))
    return None if found is None else found["home"]


def node_of(name: str) -> str | None:
    """The node that serves a sampling session or a request; None for a model, unless it is said."""
    if ":train:" not in name and ":sample:" not in name:
        return home_of(name)
    if found := _NODE.search(name, _WORK.search(name).end()):  # type: ignore[union-attr]
        return found["node"]
    is_model = ":train:" in name and name.partition(":train:")[2].isdigit()
    return None if is_model else home_of(name)


def is_sample(name: str) -> bool:
    return ":sample:" in name


def served_by(name: str, node: str) -> str:
    """The name that says which node serves it; unchanged where that is its home."""
    return name if home_of(name) in (node, None) else f"{name}@{node}"


def plain(request_id: str) -> str:
    """A request's id as its node knows it. Of a sampler's, the node is part of the sampler."""
    return request_id if is_sample(request_id) else request_id.partition("@")[0]


def run_of(path: str) -> str | None:
    """Of `tinker://{model}/{kind}/{name}`."""
    if not path.startswith("tinker://"):
        return None
    return path.removeprefix("tinker://").partition("/")[0]
