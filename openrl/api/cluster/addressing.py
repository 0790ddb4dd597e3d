"""What a request is about: the name or the weights that tell which node it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openrl.api import codec, schema
from openrl.api.codec import Encoding
from openrl.cluster import names
from openrl.errors import UserError

V1 = "/api/v1"

_IN_BODY: Mapping[str, str] = {
    "session_heartbeat": "session_id",
    "get_info": "model_id",
    "forward_backward": "model_id",
    "forward": "model_id",
    "optim_step": "model_id",
    "save_weights": "model_id",
    "save_weights_for_sampler": "model_id",
    "save_weights_external": "model_id",
    "load_weights": "model_id",
    "unload_model": "model_id",
    "join_sampling_session": "sampling_session_id",
    "asample": "sampling_session_id",
    "retrieve_future": "request_id",
    "cancel_future": "request_id",
    "weights_info": "tinker_path",
    "copy_weights": "source_path",
    "create_model": "base_model",
    "create_sampling_session": "base_model",
}
_IN_BODY_BY_ROUTE = {f"{V1}/{name}": field for name, field in _IN_BODY.items()}
_GENERATING = (
    "/oai/api/v1/completions",
    "/oai/api/v1/chat/completions",
    "/anthropic/api/v1/messages",
    "/anthropic/api/v1/messages/count_tokens",
)
BODIES = frozenset({*_IN_BODY_BY_ROUTE, f"{V1}/retrieve_futures", *_GENERATING})
"""The routes whose body says it."""

_MODEL_ID = 1  # of ForwardBackwardRequest in wire.proto


@dataclass(frozen=True, slots=True)
class Address:
    """`name`: a session, model, sampling session or request. With `new` it is to be placed. Where
    there is none, or a new one, `path` or `base` are the weights that it stands on."""

    name: str | None = None
    new: bool = False
    base: str | None = None
    path: str | None = None


class Said(schema.Body, frozen=True):
    """All the fields that say it, of any route."""

    session_id: str | None = None
    model_id: str | None = None
    request_id: str | None = None
    sampling_session_id: str | None = None
    target: schema.FeedTarget | None = None
    base_model: str | None = None
    model_path: str | None = None
    path: str | None = None
    tinker_path: str | None = None
    source_path: str | None = None
    model: str | None = None
    model_seq_id: int | None = None
    sampling_session_seq_id: int | None = None


def in_path(match: Mapping[str, str]) -> Address | None:
    """Of a route whose path says it."""
    for part in ("session_id", "model_id", "run", "sampler_id"):
        if part in match:
            return Address(match[part])
    return None


def in_body(route: str, body: bytes, encoding: Encoding) -> Address | None:
    """None for what says nothing: this node answers it, as it sees fit. Raises `UserError`."""
    if encoding is Encoding.PROTOBUF:
        return Address(first_text(body, _MODEL_ID))
    said = codec.parse(body, encoding, Said)
    if new := _new(route, said):
        return new
    if said.target is not None:
        return Address(said.target.sampling_session_id)
    if (field := _IN_BODY_BY_ROUTE.get(route)) and (value := getattr(said, field)):
        return Address(path=value) if value.startswith("tinker://") else Address(value)
    if route in _GENERATING and said.model is not None:
        base, _, path = said.model.partition(";")
        return _weights(None if base.startswith("tinker://") else base, path or base)
    return _weights(said.base_model, said.model_path)


def _new(route: str, said: Said) -> Address | None:
    if route == f"{V1}/create_sampling_session":
        name = f"{said.session_id}:sample:{said.sampling_session_seq_id}"
        return Address(name, True, said.base_model, said.model_path)
    makes_model = route in (f"{V1}/create_model", f"{V1}/load_weights", f"{V1}/copy_weights")
    if makes_model and said.session_id is not None and said.model_seq_id is not None:
        name = f"{said.session_id}:train:{said.model_seq_id}"
        base = said.base_model if route == f"{V1}/create_model" else None
        return Address(name, True, base, said.path or said.source_path)
    return None


def _weights(base: str | None, path: str | None) -> Address | None:
    if path is not None and names.run_of(path):
        return Address(path=path)
    return None if base is None else Address(base=base)


def first_text(message: bytes, field: int) -> str | None:
    """The text in a field of a protobuf message, without reading what its other fields hold. None
    when it is not there. Raises `UserError` for what is no message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(message, at)
                if tag >> 3 == field:
                    return message[at : at + size].decode(errors="replace")
                at += size
            case 5:
                at += 4
            case _:
                raise UserError("malformed protobuf body")
    return None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise UserError("malformed protobuf body")
