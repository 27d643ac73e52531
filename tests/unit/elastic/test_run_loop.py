"""What torch makes of a loss on its way through its futures is undone."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch

from elastic.errors import PeerLost
from elastic.run_loop import unwrapped
from elastic.runtime.session import Session


@pytest.fixture
def session():
    return create_autospec(Session, instance=True)


def hook_that_reduces_twice() -> None:
    """As PowerSGD's: the second reduction begins in a callback of the first one's future."""

    def second(_: object) -> None:
        raise PeerLost("lost h:0#1")

    first: torch.futures.Future[None] = torch.futures.Future()
    result = first.then(second)
    first.set_result(None)
    result.wait()


def test_a_loss_that_a_callback_of_a_future_was_told_of_is_raised_as_such(session):
    session.raise_if_told.side_effect = PeerLost("lost h:0#1")
    with pytest.raises(PeerLost, match=r"^lost h:0#1$"):
        unwrapped(session, hook_that_reduces_twice)


def test_an_error_of_the_script_stays_what_it_is(session):
    with pytest.raises(RuntimeError, match="size of tensor"):
        unwrapped(session, lambda: torch.zeros(2) + torch.zeros(3))
    session.raise_if_told.assert_called_once_with()


def test_a_result_comes_back(session):
    assert unwrapped(session, lambda: 3) == 3
