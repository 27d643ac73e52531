"""Static and elastic jobs, which run the calls of Horovod's executors and have the same interface."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import elastic.ray
from elastic.errors import Invalid
from horovod.ray.settings import checked_environment

Callbacks = Sequence[Callable[[Any], None]]


class PlacementTimeout(Invalid, TimeoutError):
    """Error raised when the cluster does not have enough free resources for the workers within the timeout.

    The message lists the resources.
    """


class _Job:
    """Base class of both kinds of job.

    It holds the callbacks of the current call, and the executor, which checks the arguments.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Create the executor.

        Raises:
            Invalid: an argument is invalid.
        """
        self._arguments = arguments
        self._callbacks: Callbacks = ()
        self._executor = self._made(arguments)
        self._begun = False
        self._makes: tuple[type, tuple[Any, ...], dict[str, Any]] | None = None

    def _made(self, arguments: dict[str, Any]) -> elastic.ray.Executor:
        return elastic.ray.Executor(**arguments, on_report=self._reported)

    def start(
        self,
        cls: type | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        environ: Mapping[str, Any] | None,
    ) -> None:
        variables = checked_environment(environ)
        if self._begun:
            raise Invalid("this executor was already started: call shutdown() first")
        if cls is not None and not callable(cls):
            raise Invalid(f"executable_cls is a {type(cls).__name__}: pass a class")
        self._makes = None if cls is None else (cls, tuple(args or ()), dict(kwargs or {}))
        self._start(variables)
        self._begun = True

    def _start(self, variables: Mapping[str, str]) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        self._begun = False
        self._executor.shutdown()

    def _called(
        self, callbacks: Callbacks | None, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a function on the workers, and return the values by rank.

        The callbacks receive the values that workers log.
        """
        self._need(fn, callbacks)
        with self._calling_back(callbacks):
            return self._executor.run(fn, *args, **kwargs)

    @contextlib.contextmanager
    def _calling_back(self, callbacks: Callbacks | None) -> Iterator[None]:
        self._callbacks = list(callbacks or ())
        try:
            yield
        finally:
            self._callbacks = ()

    def _need(self, fn: object, callbacks: Callbacks | None = None) -> None:
        if not callable(fn):
            raise Invalid(f"fn is a {type(fn).__name__}: pass a function")
        for each in callbacks or ():
            if not callable(each):
                raise Invalid(f"callbacks contains a {type(each).__name__}: pass functions")
        if not self._begun:
            raise Invalid("this executor has no workers: call start() first")

    def _reported(self, report: elastic.ray.Report) -> None:
        for callback in self._callbacks:
            callback(dict(report.metrics))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        callbacks: Callbacks | None,
    ) -> list[Any]:
        return self._called(callbacks, fn, *(args or ()), **(kwargs or {}))


class StaticJob(_Job):
    """Job with persistent workers, which keep their objects between calls."""

    def _start(self, variables: Mapping[str, str]) -> None:
        cls, args, kwargs = self._makes or (None, (), {})
        try:
            self._executor.start(_Kept, (cls, args, kwargs), None, variables)
        except Invalid as error:
            raise PlacementTimeout(str(error)) from None

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        self._need(fn)
        return self._executor.run_remote(fn, *(args or ()), **(kwargs or {}))

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks | None = None) -> list[Any]:
        self._need(fn, callbacks)
        with self._calling_back(callbacks):
            return self._executor.execute(_OnObject(fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        self._need(fn)
        return self._executor.execute_single(_OnObject(fn))


class ElasticJob(_Job):
    """Job that starts new workers for each call. Each worker creates its object at the beginning of the call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._most = arguments["max_workers"]
        super().__init__(arguments)

    def _start(self, variables: Mapping[str, str]) -> None:
        if self._most is None:
            room = self._room()
            most = max(room, self._arguments["min_workers"])
            self._executor = self._made(self._arguments | {"max_workers": most})
        try:
            self._executor.start(extra_env_vars=variables)
        except Invalid as error:
            raise PlacementTimeout(str(error)) from None

    def _room(self) -> int:
        from horovod.ray.elastic_v2 import RayHostDiscovery

        needed = self._arguments["resources_per_worker"]
        gpus = needed.get("GPU")
        discovery = RayHostDiscovery(gpus is not None, needed["CPU"], gpus)
        return sum(discovery.find_available_hosts_and_slots().values())

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        raise NotImplementedError(
            "run_remote() returns one reference per rank, but the number of ranks of an elastic job can change:"
            " call run() instead"
        )

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks | None = None) -> list[Any]:
        return self._called(callbacks, _with_object, self._makes, fn)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self._called(None, _on_rank_0, self._makes, fn)[0]


class _Kept:
    """Holder of the object of a persistent worker. The object is None if no class is given."""

    def __init__(
        self, cls: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.object = None if cls is None else cls(*args, **kwargs)


class _OnObject:
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self._fn = fn

    def __call__(self, kept: _Kept) -> Any:
        return self._fn(kept.object)


def _with_object(
    makes: tuple[type, tuple[Any, ...], dict[str, Any]] | None, fn: Callable[[Any], Any]
) -> Any:
    if makes is None:
        return fn(None)
    cls, args, kwargs = makes
    return fn(cls(*args, **kwargs))


def _on_rank_0(
    makes: tuple[type, tuple[Any, ...], dict[str, Any]] | None, fn: Callable[[Any], Any]
) -> Any:
    import horovod.torch as hvd

    hvd.init()
    return _with_object(makes, fn) if hvd.rank() == 0 else None
