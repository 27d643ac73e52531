"""Search for live objects of a class in the heap."""

from __future__ import annotations

import abc

from elastic.runtime.live_objects import live_objects


class Counted(abc.ABCMeta):
    """Metaclass of an abstract class that counts ``issubclass()`` calls."""

    calls = 0

    def __subclasscheck__(cls, other: type) -> bool:
        Counted.calls += 1
        return super().__subclasscheck__(other)


class Stage(metaclass=Counted):
    def __init__(self) -> None:
        self.parts: list[int] = []


class Child(Stage):
    pass


class Proxy:
    """Reports the class of another object."""

    def __init__(self) -> None:
        self.parts: list[int] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Stage


def test_objects_of_subclasses_are_found_and_proxies_are_not():
    stage, child, proxy = Stage(), Child(), Proxy()
    found = live_objects(Stage)
    assert {id(each) for each in found} == {id(stage), id(child)}
    assert not any(each is proxy for each in found)
    assert live_objects(Child) == [child]
    assert live_objects() == []


def test_scan_of_the_heap_when_a_class_is_abstract_then_its_subclass_check_is_not_called():
    before = Counted.calls
    assert live_objects(Stage) == []
    assert Counted.calls == before
