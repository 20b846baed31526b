"""Asking ahead changes when a row is made, never what it holds or who is told of a failure."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.hidden_states.prefetch import Prefetch


@given(ahead=st.integers(0, 6), end=st.integers(1, 30), start=st.integers(0, 29), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_same_rows_for_every_number_ahead(ahead: int, end: int, start: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, end - 1), max_size=12)) + list(range(min(start, end), end))
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number * number

    with closing(Prefetch(make, ahead, end)) as ready:
        assert [ready.get(number) for number in asked] == [number * number for number in asked]
    assert max(made, default=0) < end


def test_rows_are_made_side_by_side_and_no_more_than_asked_for() -> None:
    """Four rows that wait for each other can only be made if four are made at once."""
    barrier, running, most = threading.Barrier(4), [], []

    def make(number: int) -> int:
        running.append(number)
        most.append(len(running))
        if number < 4:
            barrier.wait(timeout=10)
        running.remove(number)
        return number

    with closing(Prefetch(make, 4, 20)) as ready:
        assert [ready.get(number) for number in range(20)] == list(range(20))
    assert max(most) == 4


def test_nothing_runs_beside_the_caller_without_threads() -> None:
    names: list[str] = []
    with closing(Prefetch(lambda number: names.append(threading.current_thread().name), 0, 9)) as ready:
        for number in range(3):
            ready.get(number)
    assert names == [threading.current_thread().name] * 3


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_failure_reaches_the_one_who_asks_for_that_row(ahead: int) -> None:
    def make(number: int) -> int:
        if number == 2:
            raise UserError("row 2 is not to be had")
        return number

    with closing(Prefetch(make, ahead, 9)) as ready:
        assert [ready.get(0), ready.get(1)] == [0, 1]
        with pytest.raises(UserError, match="row 2"):
            ready.get(2)
        assert ready.get(3) == 3


def test_closing_waits_for_what_is_being_made() -> None:
    begun, done = threading.Event(), []

    def make(number: int) -> int:
        begun.set()
        time.sleep(0.05)
        done.append(number)
        return number

    ready = Prefetch(make, 2, 9)
    ready.get(0)
    assert begun.is_set()
    ready.close()
    count = len(done)
    time.sleep(0.15)
    assert len(done) == count, "nothing goes on behind the caller's back"
