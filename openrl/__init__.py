"""OpenRL: a self-hosted post-training service for language models.

    import openrl

    async with openrl.connect("http://127.0.0.1:8000", "tml-local") as client:
        model = await client.create_model("Qwen/Qwen3-4B", rank=32)

The names below load on first use, so that `import openrl` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrl.client import Client, Model, Pending, Sampler, Wait, connect
    from openrl.errors import OpenRLError, ServerError, UserError
    from openrl.types import (
        AdamParams,
        Datum,
        ForwardBackwardOutput,
        OptimStepDone,
        SampledSequence,
        SampleOutput,
        TopLogprobs,
    )

__all__ = [
    "AdamParams",
    "Client",
    "Datum",
    "ForwardBackwardOutput",
    "Model",
    "OpenRLError",
    "OptimStepDone",
    "Pending",
    "SampleOutput",
    "SampledSequence",
    "Sampler",
    "ServerError",
    "TopLogprobs",
    "UserError",
    "Wait",
    "connect",
]

_CLIENT = {"Client", "Model", "Pending", "Sampler", "Wait", "connect"}
_ERRORS = {"OpenRLError", "ServerError", "UserError"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'openrl' has no attribute {name!r}")
    module = "client" if name in _CLIENT else "errors" if name in _ERRORS else "types"
    value = getattr(import_module(f"openrl.{module}"), name)
    globals()[name] = value
    return value
