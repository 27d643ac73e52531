"""Metadata that a worker sends with Ready."""

from __future__ import annotations

import msgspec
import pytest

from elastic.protocol.messages import (
    MEMBERS_WITH_METADATA,
    METADATA_LIMIT,
    METADATA_VALUES,
    Address,
)
from elastic.runtime.process_groups import STORE
from elastic.runtime.world_entry import _sendable

ADDRESS = Address("10.0.0.1", 7000)


def test_metadata_is_sent_with_the_address_of_the_store():
    sent = _sendable({"islands": "eu"}, ADDRESS, MEMBERS_WITH_METADATA)
    assert sent["islands"] == "eu"
    assert msgspec.json.decode(sent[STORE], type=Address) == ADDRESS


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, set()),
        ({"long": "x" * (METADATA_LIMIT + 1)}, set()),
        ({"long": "x" * (METADATA_LIMIT + 1), "islands": "eu"}, {"islands", STORE}),
        ({str(n): "x" for n in range(METADATA_VALUES)}, set()),
    ],
)
def test_metadata_beyond_the_limits_of_the_driver_is_not_sent(given, sent):
    assert _sendable(given, ADDRESS, 2).keys() == sent


def test_worker_of_a_world_whose_members_receive_no_metadata_sends_none():
    assert _sendable({"islands": "eu"}, ADDRESS, MEMBERS_WITH_METADATA + 1) == {}
