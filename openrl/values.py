"""What settings take, each kind with its bounds and the words that errors and pages say it in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args

from msgspec import Meta, Struct

Count: TypeAlias = Annotated[int, Meta(ge=1, description="a whole number, at least 1")]
Whole: TypeAlias = Annotated[int, Meta(ge=0, description="a whole number, at least 0")]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535, description="a port: 0 (any) to 65535")]
Seconds: TypeAlias = Annotated[
    float, Meta(ge=0, le=1e9, description="seconds, at least 0 and finite")
]
Weight: TypeAlias = Annotated[float, Meta(gt=0, le=1e6, description="a number above 0")]
Home: TypeAlias = Annotated[
    str,
    Meta(
        pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="lowercase letters, digits, -"
    ),
]
NodeName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?)?$",
        description="lowercase letters, digits, . and -",
    ),
]
Key: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(tml-[!-~]{16,256})?$",
        description="a secret of at least 16 characters behind tml-",
    ),
]
KeyOrHash: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(tml-[!-~]{16,256}|sha256:[0-9a-f]{64})$",
        description="a key (tml- and at least 16 characters) or its hash (sha256:...)",
    ),
]
Device: TypeAlias = Annotated[
    str,
    Meta(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, mps, cuda or cuda:N"),
]


class OwnerQuota(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one owner may have; None is what everybody may."""

    weight: Weight | None = None
    max_models: Whole | None = None
    full_models: Whole | None = None
    max_queued_samples: Count | None = None
    max_queued_bytes: Count | None = None
    max_queued_requests: Count | None = None
    tokens_per_minute: Whole | None = None


Owners: TypeAlias = Annotated[
    Mapping[str, OwnerQuota],
    Meta(description="for each owner a table of " + ", ".join(OwnerQuota.__struct_fields__)),
]


def expected(hint: Any) -> str:
    """What a key takes, in words."""
    if hint in (str, Path, bool):
        return {str: "text", Path: "a path", bool: "true or false"}[hint]
    if words := [m.description for m in getattr(hint, "__metadata__", ()) if m.description]:
        return str(words[0])
    arguments = get_args(hint)
    if arguments and type(None) in arguments:
        return expected(next(a for a in arguments if a is not type(None)))
    if len(arguments) == 2 and arguments[0] is str:
        return f"names, each with {expected(arguments[1])}"
    return "one of " + ", ".join(str(a) for a in arguments)
