from elastic.protocol.pending_handshakes import (
    BYTES_LIMIT,
    COUNT_LIMIT,
    PendingHandshakes,
    count_limit,
)


def test_most_descriptors_and_a_bounded_memory_are_for_authenticated_peers():
    assert count_limit(1024, descriptors=1024) == 256
    assert count_limit(1024, descriptors=1 << 20) == COUNT_LIMIT
    assert count_limit(1024, descriptors=-1) == COUNT_LIMIT
    assert count_limit(1024, descriptors=8) == 16
    assert count_limit(1 << 18, descriptors=-1) * (1 << 18) <= BYTES_LIMIT
    assert count_limit(1024, descriptors=1024, extra=8) == 264


def test_newest_handshake_evicts_the_oldest():
    strangers = PendingHandshakes[str](patience_s=5.0, limit=2)
    assert strangers.add("a", 0.0) is None
    assert strangers.add("b", 1.0) is None
    assert strangers.add("c", 2.0) == "a"
    assert "a" not in strangers and strangers.all() == ["b", "c"]


def test_an_authenticated_peer_frees_its_unauthenticated_slot():
    strangers = PendingHandshakes[str](patience_s=5.0, limit=1)
    strangers.add("rank 1", 0.0)
    strangers.remove("rank 1")
    strangers.remove("rank 1")
    assert strangers.add("b", 1.0) is None


def test_peer_beyond_its_patience_is_late():
    strangers = PendingHandshakes[str](patience_s=5.0, limit=9)
    strangers.add("a", 0.0)
    strangers.add("b", 3.0)
    assert strangers.late(5.0) == []
    assert strangers.late(5.1) == ["a"]
