"""What `top` makes of a stream: shares, rates and reasons, worked out by hand."""

from __future__ import annotations

import pytest

from openrl.commands.board import WINDOW, Board, events

STREAM = b"""\
id: x.-1.0
event: hello
data: {"boot": "x", "clock": 100.0, "unix": 1.0}

event: passes
data: [[0, "train", 70.0, 80.0, 10.0, 999, 1, [["old", 10.0]]],\
 [1, "train", 88.0, 92.0, 4.0, 400, 2, [["one", 3.0], ["two", 1.0]]],\
 [2, "decode", 95.0, 96.0, 1.0, 40, 1, [["two", 1.0]]]]

event: new in some later version
data: {}

event: engine
data: {"waiting": 3, "running": 1, "trouble": "disk full", "models": [\
{"name": "m", "state": "loading", "stage": "reading weights", "fraction": 0.5}]}

event: jobs
data: {"jobs": [{"id": "two", "owner": "other-1", "mine": false, "seconds": 9.0, "active": true},\
 {"id": "one", "owner": "ann", "seconds": 5.0, "tokens": 7, "name": "n",\
 "models": [{"id": "one:train:0", "base": "m", "rank": 8}],\
 "waits": [{"count": 2, "kind": "sample", "why": "behind two"},\
 {"count": 1, "kind": "train", "why": "next"}]}]}

event: clock
data: {"clock": 100.0, "unix": 1.0}
"""


def test_shares_and_rates_are_of_the_window() -> None:
    board = Board()
    for event, value in events(STREAM.splitlines(keepends=True)):
        board.take(event, value)
    picture = board.picture()
    # Of the pass from 88 to 92 one half lies in the ten seconds before 100.
    assert picture.busy == pytest.approx({"train": 2.0 / WINDOW, "decode": 1.0 / WINDOW})
    assert picture.tokens_per_second == pytest.approx((200 + 40) / WINDOW)
    shares = {row.job: row.share for row in picture.rows}
    assert shares == pytest.approx({"one": 1.5 / 3.0, "two": 1.5 / 3.0})
    one = next(row for row in picture.rows if row.job == "one")
    assert (one.owner, one.name, one.models, one.tokens) == ("ann", "n", ("m r8",), 7)
    assert (one.waiting, one.why) == (3, "sample: behind two; train: next")
    two = next(row for row in picture.rows if row.job == "two")
    assert (two.tokens, two.waiting, two.why) == (None, 0, "")
    assert (picture.waiting, picture.running, picture.trouble) == (3, 1, "disk full")
    assert picture.models == ("m reading weights 50%",)


def test_a_quiet_engine_has_no_shares() -> None:
    board = Board()
    board.take("jobs", {"jobs": [{"id": "a", "owner": "o", "seconds": 0.0}]})
    board.take("clock", {"clock": 5.0})
    assert [row.share for row in board.picture().rows] == [0.0]
    assert board.picture().tokens_per_second == 0.0
