"""Writes `openrl/client/blocking.pyi` from the async classes: `python docs/client_stub.py`."""

from __future__ import annotations

import ast
from pathlib import Path

_CLIENT = Path(__file__).parent.parent / "openrl" / "client"
STUB = _CLIENT / "blocking.pyi"

_CLASSES = {"Client": "client.py", "Model": "model.py", "Sampler": "sampler.py"}
_TYPES = {
    "Client": "BlockingClient",
    "Model": "BlockingModel",
    "Sampler": "BlockingSampler",
    "Pending": "BlockingPending",
    "AsyncIterator": "Iterator",
}
_HEAD = '''"""Made by `python docs/client_stub.py`: what `openrl.client.blocking` has."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from openrl.client.client import Client
from openrl.client.model import DEFAULT_ADAM
from openrl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepDone, SampleOutput

T = TypeVar("T")

class BlockingPending(Generic[T]):
    request_id: str
    def result(self) -> T: ...
'''
_EXTRA = {
    "Client": [
        "    url: str",
        "    session_id: str",
        "    @classmethod",
        "    def enter(cls, client: Client) -> BlockingClient: ...",
        "    def leave(self, *raised: Any) -> None: ...",
    ],
    "Model": ["    model_id: str", "    base_model: str"],
    "Sampler": ["    sampling_session_id: str"],
}


class _Renamed(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(_TYPES.get(node.id, node.id))


def text() -> str:
    return "\n".join([_HEAD, *(_face(name) for name in _CLASSES)])


def _face(name: str) -> str:
    tree = ast.parse((_CLIENT / _CLASSES[name]).read_text(encoding="utf-8"))
    (found,) = (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == name)
    methods = [_method(node) for node in found.body if _is_public(node)]
    return "\n".join([f"class {_TYPES[name]}:", *_EXTRA[name], *methods, ""])


def _is_public(node: ast.stmt) -> bool:
    """What the face has to offer; `submit` is for models."""
    return (
        isinstance(node, ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and node.name != "submit"
    )


def _method(node: ast.stmt) -> str:
    assert isinstance(node, ast.AsyncFunctionDef)
    returns = _Renamed().visit(node.returns) if node.returns else None
    arguments = ast.unparse(node.args)
    return f"    def {node.name}({arguments}) -> {ast.unparse(returns) if returns else 'Any'}: ..."


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
