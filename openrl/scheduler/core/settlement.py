"""What each participant of a finished pass used, by the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.scheduler.core import costs
from openrl.scheduler.core.costs import CostModel, Features
from openrl.scheduler.core.events import Finished
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.passes import Flight


@dataclass(slots=True)
class Part:
    """One lane's part of a pass."""

    features: Features
    tokens: int
    seconds: float = 0.0


def settle(flight: Flight, event: Finished, model: CostModel) -> dict[Share, Part]:
    """Splits the measured seconds over the lanes, and teaches the model."""
    parts = _decode_parts(flight, event) if flight.group[1] == "sample" else _train_parts(flight)
    if not parts:
        return {}
    seconds = max(0.0, event.seconds)
    whole = tuple(map(sum, zip(*(part.features for part in parts.values()), strict=True)))
    features = [part.features for part in parts.values()]
    for part, share in zip(parts.values(), model.split(features, seconds), strict=True):
        part.seconds = share
    model.learn(whole, seconds)
    return parts


def _train_parts(flight: Flight) -> dict[Share, Part]:
    tokens: dict[Share, int] = {}
    counts: dict[Share, int] = {}
    for request, size in zip(flight.parts, flight.tokens, strict=True):
        tokens[request.share] = tokens.get(request.share, 0) + size
        counts[request.share] = counts.get(request.share, 0) + 1
    share = 1.0 / len(counts)
    match flight.group[1]:
        case "train":
            features = {leaf: costs.train_features(share, tokens[leaf], 1.0) for leaf in counts}
        case "optim":
            features = {leaf: costs.optim_features(share, counts[leaf]) for leaf in counts}
        case _:
            features = dict.fromkeys(counts, (share,))
    return {leaf: Part(features[leaf], tokens[leaf]) for leaf in counts}


def _decode_parts(flight: Flight, event: Finished) -> dict[Share, Part]:
    """By the tokens that each lane's rows made; by rows when none made any."""
    made = {one.row: one.new_tokens for one in event.rows}
    new: dict[Share, int] = {}
    rows: dict[Share, int] = {}
    prefilled: dict[Share, int] = {}
    steps = 0
    for row_id, row in flight.rows.items():
        tokens = made.get(row_id, 0)
        steps = max(steps, tokens)
        new[row.share] = new.get(row.share, 0) + tokens
        rows[row.share] = rows.get(row.share, 0) + 1
    for row_id, tokens in flight.prefills.items():
        share = flight.rows[row_id].share
        prefilled[share] = prefilled.get(share, 0) + tokens
    total = sum(new.values())
    parts: dict[Share, Part] = {}
    for share, tokens in new.items():
        part = tokens / total if total else rows[share] / len(flight.rows)
        read = prefilled.get(share, 0)
        features = costs.decode_features(part, part * steps, tokens, read)
        parts[share] = Part(features, tokens + read)
    return parts
