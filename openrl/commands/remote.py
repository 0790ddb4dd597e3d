"""One server over HTTP, for commands: it asks, waits and says what is wrong."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen

import click

from openrl.config import environ
from openrl.errors import NotFound, OpenRLError, Unauthenticated, Unavailable, UserError
from openrl.keys import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"
LOCAL_KEY = "tml-local"
SECONDS = 30.0
_BITE = 1 << 20


@dataclass(frozen=True, slots=True)
class Remote:
    url: str
    key: str

    def get(self, path: str, **query: Any) -> Any:
        asked = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(asked)}" if asked else path)

    def readiness(self) -> Any:
        """Also when the server says that it is not ready."""
        request = self._request("GET", f"{self.url}/api/v1/readyz")
        with self._reading(self.url), self._open(request, SECONDS, also=503) as answer:
            return json.load(answer)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._ask("POST", path, body or {})

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask("PUT", path, body)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path)

    def stream(self, path: str, seconds: float = SECONDS) -> IO[bytes]:
        """An answer to be read piece by piece, and closed. `seconds` bounds each silence."""
        return self._open(self._request("GET", f"{self.url}/api/v1/{path}"), seconds)

    def fetch(self, url: str, file: Path) -> None:
        """From a link that the server gave, which is a key itself."""
        with self._reading(url), self._open(Request(url), SECONDS) as source, file.open("wb") as to:
            shutil.copyfileobj(source, to, _BITE)

    def open_link(self, url: str) -> IO[bytes]:
        return self._open(Request(url), SECONDS)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        url = f"{self.url}/api/v1/{path}"
        with self._reading(url), self._open(self._request(method, url, body), SECONDS) as answer:
            return json.load(answer)

    def _request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Request:
        headers = {"X-API-Key": self.key, "Accept": "application/json"}
        if body is None:
            return Request(url, headers=headers, method=method)
        headers["Content-Type"] = "application/json"
        return Request(url, json.dumps(body).encode(), headers, method=method)

    def _open(self, request: Request, seconds: float, also: int | None = None) -> IO[bytes]:
        """`also`: a status that is an answer like any other."""
        try:
            return cast(IO[bytes], urlopen(request, timeout=seconds))
        except HTTPError as error:
            if error.code == also:
                return cast(IO[bytes], error)
            raise _refusal(error, self.url) from error
        except (URLError, OSError) as error:
            raise self._away(getattr(error, "reason", error)) from error

    @contextmanager
    def _reading(self, url: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"what {urlsplit(url).netloc} sent cannot be read: {error}"
            ) from error

    def _away(self, reason: object) -> Unavailable:
        return Unavailable(
            f"no server at {self.url} ({reason}): start one with openrl serve, or say where it is "
            "with --url or OPENRL_URL"
        )


def _refusal(error: HTTPError, url: str) -> OpenRLError:
    with error:
        text = error.read(1 << 16).decode(errors="replace").strip()
    try:
        body = json.loads(text)
        said = next(body[name] for name in ("detail", "error", "message") if name in body)
    except (ValueError, StopIteration, TypeError):
        return NotFound(
            f"{url} answers HTTP {error.code}, but not as an OpenRL server: is it the address that "
            "openrl serve printed, with nothing after the port?"
        )
    if error.code == 401:
        return Unauthenticated(f"{said}. Give a key with --api-key or OPENRL_API_KEY")
    return UserError(str(said))


def at(run: str, *parts: str) -> str:
    return "/".join(["training_runs", quote(run, safe=""), *parts])


def where(command: Callable[..., None]) -> Callable[..., None]:
    """The flags `url` and `api_key`."""
    options = (
        click.option("--url", metavar="URL", help=f"The server; OPENRL_URL, or {DEFAULT_URL}."),
        click.option("--api-key", metavar="KEY", help="OPENRL_API_KEY says it as well."),
    )
    return functools.reduce(lambda inner, option: option(inner), reversed(options), command)


def with_remote(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command `remote`, which those flags name."""

    @functools.wraps(command)
    def wrapped(*, url: str | None, api_key: str | None, **rest: Any) -> None:
        command(remote=find(url, api_key), **rest)

    return where(wrapped)


def find(url: str | None, key: str | None, env: Mapping[str, str] = environ) -> Remote:
    """What was typed, then OPENRL_URL and OPENRL_API_KEY, then the SDK's names for the same.
    On this machine a key may be left out. Raises `UserError`."""
    root = url or env.get("OPENRL_URL") or env.get("TINKER_BASE_URL") or DEFAULT_URL
    host = urlsplit(root).hostname
    if urlsplit(root).scheme not in ("http", "https") or not host:
        raise UserError(f"{root!r} is no address of a server: write it like {DEFAULT_URL}")
    key = key or env.get("OPENRL_API_KEY") or env.get("TINKER_API_KEY")
    if key is None and not is_loopback(host):
        raise UserError(f"{root} wants a key: give one with --api-key or OPENRL_API_KEY")
    return Remote(root.rstrip("/").removesuffix("/api/v1"), key or LOCAL_KEY)
