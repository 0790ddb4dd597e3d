"""What each version of the `tinker` SDK can be told. See `client_config`."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from aiohttp import web

from openrl.errors import UserError

Version: TypeAlias = tuple[int, int]

OLDEST: Version = (0, 12)
NEWEST: Version = (999, 0)
FEEDS_SINCE: Version = (0, 36)
"""From here on a reader of `retrieve_futures` says what it has fetched, and fails its samples when
it fails itself."""

_NUMBER = re.compile(r"(\d{1,4})\.(\d{1,4})")


def sdk_version(request: web.Request) -> Version:
    """Every request of the SDK names it; whoever does not is taken for the newest."""
    return parse(request.headers.get("X-Stainless-Package-Version", ""))


def parse(text: str) -> Version:
    found = _NUMBER.match(text)
    return (int(found[1]), int(found[2])) if found else NEWEST


def check(version: Version) -> None:
    """Raises `UserError` for an SDK whose protocol is another."""
    if version < OLDEST:
        number = ".".join(map(str, version))
        raise UserError(f"SDK version {number} is not supported here: tinker 0.12 or later is")


def client_config(version: Version, issue_jwts: bool = False) -> dict[str, Any]:
    """Flags that change how the SDK calls us; only what this server does is switched on.

    Parallel chunks stay off: they arrive in reverse, and one that is refused makes the client hang.
    """
    flags: dict[str, Any] = {"parallel_fwdbwd_chunks": False}
    if (0, 20) <= version < (0, 25):
        flags["proto_write_fwdbwd"] = True
    if (0, 22) <= version < (0, 25):
        flags["fwd_via_fwdbwd"] = True
    if (0, 24) <= version < (0, 38):
        flags["create_model_via_load_weights"] = True
    if version >= (0, 32):
        flags["sample_join_sampling_session"] = True
    if version >= FEEDS_SINCE:
        flags["sample_use_retrieve_futures"] = True
    if issue_jwts and version >= (0, 18):
        flags["pjwt_auth_enabled"] = True
    return flags
