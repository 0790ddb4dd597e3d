"""What a node holds: how many of our objects, and how much is in each of their containers."""

import gc
from collections import Counter, deque
from collections.abc import Iterator, Sized
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

from sortedcontainers import SortedList

_CONTAINERS = (dict, list, set, frozenset, tuple, deque, SortedList)
_NOT_HELD = (type, ModuleType, CodeType, FrameType)


def holdings(*roots: object) -> Counter[str]:
    """By the name of a class, how many of its instances can be reached; by `Class.attribute`, how
    many elements are in it, of all instances together. Tracebacks are counted and not followed."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    stack: list[object] = list(roots)
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, _NOT_HELD):
            continue
        seen.add(id(each))
        found["traceback"] += isinstance(each, TracebackType)
        if _is_ours(each):
            found[type(each).__qualname__] += 1
            for name, value in _attributes(each):
                if isinstance(value, _CONTAINERS) and isinstance(value, Sized):
                    found[f"{type(each).__qualname__}.{name}"] += len(value)
        stack += _referents(each)
    return found


def _is_ours(each: object) -> bool:
    return type(each).__module__.startswith("openrl")


def _attributes(each: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(each, "__dict__", {}).items()
    for kind in type(each).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(each, name):
                yield name, getattr(each, name)


def _referents(each: object) -> list[object]:
    """Of a function, what it closes over: its module holds nothing of the node's."""
    if isinstance(each, FunctionType):
        return [cell.cell_contents for cell in each.__closure__ or () if _is_filled(cell)]
    if isinstance(each, MethodType):
        return [each.__self__]
    return gc.get_referents(each)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
