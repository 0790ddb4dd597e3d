"""Start-time fair queueing over a tree: everybody → owner → session → lane.

Each node has a *tag*: the virtual second at which its next service starts, among its siblings.
Whoever is ready with the lowest tag goes first; service of `s` measured seconds moves the tag
by `s / weight`. Each parent has a *clock*, the tag of the child it served last. A node that
becomes ready, or is charged while it is not, is lifted to its parent's clock: what it did not
ask for is not owed to it, so idle time earns no credit.

(P. Goyal, H. Vin, H. Cheng: Start-time fair queueing, SIGCOMM 1996; the hierarchy is theirs too.)

A leaf is ready in some *groups* (what can share a pass); each node keeps its ready children
sorted by tag for each group, so that every operation is logarithmic in the children of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from sortedcontainers import SortedList  # type: ignore[import-untyped]

from openrl.scheduler.core.packing import Group

_order = count()


@dataclass(slots=True, eq=False)
class Share:
    """`tag` and `clock` are virtual seconds; `order` breaks ties: first come, first served.
    `users` counts the children that are `used`; the others are kept while their tags matter.
    `above` is (node, parent) from the parent up to the root's child: with the node itself in it
    each would be a cycle, which only the collector forgets, and that looks seldom."""

    name: str
    parent: Share | None
    weight: float = 1.0
    tag: float = 0.0
    clock: float = 0.0
    order: int = field(default_factory=lambda: next(_order))
    groups: set[Group] = field(default_factory=set)
    queues: dict[Group, SortedList] = field(default_factory=dict)
    children: dict[str, Share] = field(default_factory=dict)
    fading: list[tuple[float, int, Share]] = field(default_factory=list)
    used: bool = False
    users: int = 0
    above: tuple[tuple[Share, Share], ...] = ()

    @property
    def key(self) -> tuple[float, int, Share]:
        return (self.tag, self.order, self)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.above = self.parent.path

    @property
    def path(self) -> tuple[tuple[Share, Share], ...]:
        """(node, parent) from here up to the root's child."""
        return () if self.parent is None else ((self, self.parent), *self.above)

    @property
    def owner(self) -> Share:
        """The root's child above this leaf."""
        return self.above[-1][0] if self.above else self

    def child(self, name: str, weight: float = 1.0) -> Share:
        """The child of that name, made when it is not there."""
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Share(name, self, weight, tag=self.clock)
        if not found.used:
            found.used = True
            self.users += 1
        return found


def ready(leaf: Share, group: Group) -> None:
    for node, parent in leaf.path:
        if group in node.groups:
            return
        if not node.groups:
            node.tag = max(node.tag, parent.clock)
        node.groups.add(group)
        _queue(parent, group).add(node.key)


def unready(leaf: Share, group: Group) -> None:
    for node, parent in leaf.path:
        if group not in node.groups or node.queues.get(group):
            return
        node.groups.discard(group)
        _queue(parent, group).remove(node.key)


def charge(leaf: Share, seconds: float) -> None:
    """Moves the tags from the leaf up; negative `seconds` give back part of an estimate."""
    for node, parent in leaf.path:
        tag = node.tag + seconds / node.weight
        _move(node, parent, tag if node.groups else max(parent.clock, tag))


def first(root: Share, group: Group) -> Share | None:
    """The neediest leaf that is ready in the group."""
    node = root
    while queue := node.queues.get(group):
        node = queue[0][2]
    return None if node is root else node


def leaves(root: Share, group: Group) -> Iterator[Share]:
    """All that are ready in the group."""
    for _, _, child in root.queues.get(group, ()):
        if group in child.queues:
            yield from leaves(child, group)
        else:
            yield child


def tags(leaf: Share) -> tuple[float, ...]:
    """Sort key of need: the owner's tag, then the session's, then the lane's."""
    return tuple(node.tag for node, _ in leaf.path)[::-1]


def serve(leaf: Share) -> None:
    """The leaf leads a pass: virtual time moves to its tags."""
    for node, parent in leaf.path:
        advance(parent, node.tag)


def advance(parent: Share, clock: float) -> None:
    """Moves a clock forward and forgets unused children that it has passed."""
    parent.clock = max(parent.clock, clock)
    while parent.fading and parent.fading[0][0] <= parent.clock:
        child = heappop(parent.fading)[2]
        if not child.used and parent.children.get(child.name) is child:
            _fade(child, parent)


def release(node: Share) -> None:
    """Nobody needs the node now. It is forgotten once its tag says nothing any more: when the
    clock has passed it, or when no sibling is left to compare it with."""
    parent = node.parent
    if parent is None or not node.used:
        return
    node.used = False
    parent.users -= 1
    if parent.users:
        _fade(node, parent)
    else:
        parent.clock = max(parent.clock, *(child.tag for child in parent.children.values()))
        parent.children.clear()
        parent.fading.clear()
        release(parent)


def _fade(node: Share, parent: Share) -> None:
    if node.tag > parent.clock:
        heappush(parent.fading, node.key)
    else:
        del parent.children[node.name]


def ahead(root: Share, owner: Share) -> int:
    """How many other owners with ready work come before this one."""
    before: set[str] = set()
    for queue in root.queues.values():
        for tag, order, other in queue:
            if (tag, order) >= (owner.tag, owner.order):
                break
            before.add(other.name)
    before.discard(owner.name)
    return len(before)


def _move(node: Share, parent: Share, tag: float) -> None:
    if tag == node.tag:
        return
    queues = [parent.queues[group] for group in node.groups]
    for queue in queues:
        queue.remove(node.key)
    node.tag = tag
    for queue in queues:
        queue.add(node.key)


def _queue(parent: Share, group: Group) -> SortedList:
    queue = parent.queues.get(group)
    if queue is None:
        queue = parent.queues[group] = SortedList()
    return queue
