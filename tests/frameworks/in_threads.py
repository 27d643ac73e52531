"""Abandoned objects are destroyed by a separate thread."""

from __future__ import annotations

import threading
import weakref

from elastic.tensorflow import leftover_variables


class Held:
    """Records the thread that destroys it."""

    def __init__(self, said, done):
        self.said, self.done = said, done

    def __del__(self):
        self.said.append(threading.current_thread().name)
        self.done.set()


class FakeEpochIterator:
    """As in Keras: it and its generator refer to each other."""

    def __init__(self, held):
        self._current_iterator = held
        self._epoch_iterator = self._enumerate()
        next(self._epoch_iterator)

    def _enumerate(self):
        yield self


def test_objects_in_frames_of_an_error_and_its_cause_are_destroyed_in_a_separate_thread(rank, size):
    for keep in (lambda held: held, FakeEpochIterator):
        said: list[str] = []
        done = threading.Event()

        def fit(keep=keep, said=said, done=done):
            epoch_iterator = keep(Held(said, done))  # noqa: F841
            raise ValueError("the first")

        def training(fit=fit):
            try:
                fit()
            except ValueError as error:
                raise RuntimeError("the second") from error

        try:
            training()
        except RuntimeError as error:
            first = error.__cause__
            leftover_variables.frames_of(error)
            assert error.__traceback__ is None
            assert first is not None and first.__traceback__ is None
        assert done.wait(10)
        assert said == ["elastic-left-behind"]


def test_objects_given_to_destroy_are_released_in_a_separate_thread(rank, size):
    said: list[str] = []
    done = threading.Event()
    found = [Held(said, done)]
    alive = weakref.ref(found[0])
    leftover_variables.destroy(found)
    assert done.wait(10) and alive() is None
    assert said == ["elastic-left-behind"]


def test_process_exit_waits_for_pending_destructions(rank, size):
    said: list[str] = []
    leftover_variables.destroy([Held(said, threading.Event())])
    leftover_variables.finish()
    assert said == ["elastic-left-behind"]
    done = threading.Event()
    leftover_variables.destroy([Held(said, done)])  # by another handler of the exit
    assert done.wait(10)
