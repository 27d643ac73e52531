"""Discovery of hosts as the nodes of a Ray cluster on which the job holds claims. Makes no decisions.

Claims are placement groups: see `elastic.driver.ray.placement_groups`. A check queries the claims, the draining nodes
and the nodes, in this order, so that a node that fails during the check is never considered alive. A failed check
changes nothing. The failure is logged once, and the recovery is logged when Ray responds again. Calls to Ray may block
for a long time while its head node is unavailable, so they run in a thread, one at a time, with a timeout.

Lifetime of placement groups in Ray 2.60, as tested on a cluster: with lifetime ``None``, they end with the Ray job of
their creator, even if the actor that created them ended earlier. Groups created by a *detached* actor end with its
process, even if Ray restarts the actor. With lifetime ``detached``, they exist until `close` or `remove_claims` removes
them. A driver that is a detached actor therefore needs ``detached=True``, and its successor finds the groups by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from elastic.driver.discovery.interface import Log, ResourceDemand
from elastic.driver.events import Event, HostLeaving, Notice
from elastic.driver.network.blocking_calls import SequentialCalls
from elastic.driver.network.host_lists import show
from elastic.driver.ray import placement_groups
from elastic.driver.ray.cluster import (
    Cluster,
    Group,
    Node,
    RayUnavailable,
    numbered,
    prefix_of,
    present,
)
from elastic.driver.ray.cluster import ClusterRequest as ClusterRequest
from elastic.driver.ray.placement_groups import (
    Claim,
    ClaimStage,
    Condition,
    Decision,
    PlacementGroupPool,
)
from elastic.errors import Invalid

LOOK_S = 0.25
ANSWER_S = 5.0  # time limit for the queries of one check, in seconds
CLOSE_S = 10.0
# Maximum wait for a complete first list, in seconds. After a driver failover, hosts missing from an incomplete list
# would appear lost.
SETTLE_S = 10.0
QUIET_S = 5.0  # seconds of waiting for resources after which the wait is logged
# Maximum fraction of one core used for checks. In large clusters, this makes checks less frequent.
BUSY = 0.05
PAUSE_S = 2.0  # maximum interval between two checks, in seconds

T = TypeVar("T")


def host_of(address: str, node_id: str) -> str:
    """Return the host name that the driver uses for a Ray node."""
    return f"{address}-{node_id[:8]}"


class RayDiscovery:
    """Discovery of the hosts with placed claims. It also maintains the requested number of claims.

    A later driver finds the claims by their names, which contain ``job``. Therefore, ``job`` must be unique in the
    namespace.
    """

    def __init__(
        self,
        wanted: ClusterRequest,
        log: Log,
        *,
        job: str,
        detached: bool = False,
        look_s: float = LOOK_S,
        answer_s: float = ANSWER_S,
        cluster: Cluster | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._wanted = wanted
        self._bundle = {name: amount for name, amount in wanted.resources.items() if amount}
        self._log = log
        self._prefix = prefix_of(job)
        self._detached = detached
        self._look_s = look_s
        self._answer_s = answer_s
        self._cluster = cluster or _ray()
        self._clock = clock
        self._sleep = sleep
        self._given = None if wanted.group is None else str(wanted.group.id.hex())
        self._claims = PlacementGroupPool(wanted.most, ours=self._given is None)
        self._calls = SequentialCalls("ask ray")
        self._looking = asyncio.Lock()
        self._decided = Decision()
        self._whole = False
        self._latest_look: _Look | None = None
        self._names: dict[str, str] = {}  # host name of every node that was ever listed
        self._nodes: dict[str, str] = {}  # node of each host
        self._gpus: dict[str, list[str]] = {}  # last known GPU IDs of each slot of a host
        # GPU IDs of each claim on each node, which never change
        self._known: dict[tuple[int, str], str] = {}
        self._trouble = ""
        # whether it was logged that this release of Ray does not report draining nodes
        self._silent = False
        self._closing = False
        self._need: Callable[[], ResourceDemand] | None = None
        self._noticed: Callable[[Event], None] | None = None
        self._now = now

    # ---- queries ---------------------------------------------------------------------------------------------------

    def node_of(self, host: str) -> str:
        """Return the node ID of a host.

        Raises:
            KeyError: the host was never listed.
        """
        return self._nodes[host]

    def gpus_of(self, host: str) -> list[str]:
        """Return the GPU IDs of each slot of a host, joined by commas.

        The list is empty if the job requested no GPUs.
        """
        return list(self._gpus.get(host, ()))

    def follow(self, need: Callable[[], ResourceDemand], noticed: Callable[[Event], None]) -> None:
        """Set the function ``need``, whose result determines the number of claims from the next check on.

        Before this call, ``wanted.most`` determines the number of claims. ``noticed`` is called with each preemption
        notice for a host.
        """
        self._need, self._noticed = need, noticed

    def addresses(self) -> list[str]:
        """Return the addresses of the nodes that were alive at the last check."""
        nodes = {} if self._latest_look is None else self._latest_look.nodes
        return [node.address for node in nodes.values() if node.alive]

    async def place(self, at_least: int, within_s: float) -> None:
        """Wait until Ray has placed at least ``at_least`` slots.

        Raises:
            Invalid: the slots were not placed within ``within_s`` seconds. All claims have been released.
        """
        begun = self._clock()
        waited = False
        while True:
            await self._look_and_act()
            placed = self._decided.placed
            if placed >= at_least:
                return
            passed_s = self._clock() - begun
            if passed_s >= within_s:
                break
            if passed_s >= QUIET_S and not waited:
                waited = True
                each = placement_groups.show(self._bundle)
                text = (
                    f"waiting for resources on the Ray cluster: {placed} of {at_least} workers "
                    f"of {each} each"
                )
                self._log("info", f"{text} were placed")
            await self._pause()
        reason = await self._shortage(at_least, placed, within_s)
        await self.close()
        raise Invalid(reason)

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        last: list[tuple[str, int]] | None = None
        begun = self._clock()
        while not self._closing:
            try:
                await self._look_and_act(remove=False)
            except Invalid as error:
                self._in_trouble(str(error))
            whole = self._whole or (self._latest_look and self._clock() - begun > SETTLE_S)
            hosts = self._hosts()
            if list(hosts.items()) != last and (last is not None or whole):
                last = list(hosts.items())
                yield dict(hosts)
            # The list of hosts without the claim must be yielded before the claim is removed.
            await self._act(self._remove)
            await self._pause()

    async def close(self) -> None:
        """Remove the claims of this job, and wait until Ray confirms the removal, within a time limit."""
        self._closing = True
        if self._given is not None:
            return
        until = self._clock() + CLOSE_S
        try:
            while left := await self._call(self._remove_all, CLOSE_S):
                if self._clock() >= until:
                    raise RayUnavailable(
                        f"{left} placement groups were not removed within {CLOSE_S:g} s: check the cluster"
                        " with `ray status`"
                    )
                await self._sleep(self._look_s)
        except RayUnavailable as error:
            ends = (
                "only remove_claims removes them" if self._detached else "they end with the Ray job"
            )
            self._log(
                "warning", f"placement groups {self._prefix}* can't be removed: {error}; {ends}"
            )

    # ---- one check -------------------------------------------------------------------------------------------------

    async def _look_and_act(self, *, remove: bool = True) -> None:
        async with self._looking:
            try:
                look = await self._call(self._ask, self._answer_s)
            except RayUnavailable as error:
                self._in_trouble(str(error))
                return
            self._settle(look)
            await self._act(self._make)
            if remove:
                await self._act(self._remove)

    async def _call(self, call: Callable[[], T], within_s: float) -> T:
        try:
            return await self._calls(call, within_s)
        except asyncio.TimeoutError:
            raise RayUnavailable(
                f"Ray did not respond within {within_s:g} s: check it with `ray status`"
            ) from None

    def _ask(self) -> _Look:
        """Query the state of the cluster. Runs in a thread, so it must not change this object."""
        begun = time.thread_time()
        if self._given is None:
            groups = self._cluster.claims(self._prefix)
        else:
            group = self._cluster.group(self._given)
            if group is None:
                raise RayUnavailable(
                    "the placement group of the job no longer exists in Ray, so no worker can be started: start the"
                    " job again in a new group"
                )
            groups = [group]
        draining = self._cluster.draining()
        nodes = self._cluster.nodes()
        claims, gpus, problem = [], {}, ""
        each = self._wanted.per_bundle
        share = self._wanted.gpus * each
        for number, index, group in self._numbered(groups):
            stage, node = _stage(group, index), group.nodes.get(index, "")
            ids: str | None = None if self._wanted.gpus else ""
            if ids is None and stage is ClaimStage.PLACED and node in nodes and nodes[node].alive:
                try:
                    ids = self._known.get((number, node))
                    if ids is None and (ids_of_bundle := self._cluster.gpus(group, index, share)):
                        ids = ",".join(placement_groups.part(ids_of_bundle, number % each, each))
                except RayUnavailable as error:
                    problem = f"GPU IDs of a placement group: {error}"
                if ids is not None:
                    gpus[number, node] = ids
            fits = self._given is not None or placement_groups.same(
                group.bundles[index], self._bundle
            )
            claims.append(Claim(number, stage, node, ready=ids is not None, fits=fits))
        cost_s = time.thread_time() - begun
        return _Look(claims, groups, nodes, draining, gpus, problem, cost_s)

    def _numbered(self, groups: list[Group]) -> list[tuple[int, int, Group]]:
        """Return the number, the bundle index and the group of each claim.

        Raises:
            Invalid: no bundle of the user's group is suitable.
        """
        if self._given is not None:
            wanted = self._wanted
            [group] = groups
            each = wanted.per_bundle
            room = {name: amount * each for name, amount in wanted.resources.items()}
            found = placement_groups.suitable(group.bundles, room, wanted.in_use)
            return [(i * each + slot, i, group) for i in found for slot in range(each)]
        return [(number, 0, group) for number, group in numbered(groups, self._prefix)]

    def _settle(self, look: _Look) -> None:
        if not look.nodes:
            self._in_trouble("Ray lists no node")
        elif look.problem:
            self._in_trouble(look.problem)
        elif self._trouble:
            self._trouble = ""
            self._log("info", "Ray answers again")
        if look.draining is None and not self._silent:
            self._silent = True
            text = "this release of Ray does not report draining nodes: workers there end with their node"
            self._log("warning", text)
        for id, node in look.nodes.items():
            self._names[id] = host_of(node.address, id)
            self._nodes[self._names[id]] = id
        conditions = {
            id: Condition.DEAD
            if not node.alive
            else Condition.DRAINING
            if id in (look.draining or ())
            else Condition.ALIVE
            for id, node in look.nodes.items()
        }
        self._latest_look = look
        if self._need is not None:
            need = self._need()
            used = {
                self._nodes[host]: count for host, count in need.used.items() if host in self._nodes
            }
            drained = [self._nodes[host] for host in need.drained if host in self._nodes]
            self._claims.want(need.most, used, drained)
        self._decided = self._claims.decide(look.claims, conditions)
        self._whole = bool(look.nodes) and not self._claims.unready(look.claims, conditions)
        self._known.update(look.gpus)
        for id, numbers in self._decided.seats.items():
            if self._wanted.gpus:
                self._gpus[self._names[id]] = [self._known[number, id] for number in numbers]
        for id in self._decided.drained:
            self._log(
                "info",
                f"{self._names[id]} drains: its workers leave, and replacements are requested",
            )
            ends_at = (look.draining or {}).get(id)
            if self._noticed is not None and ends_at is not None:
                left_s = max(0.0, ends_at - self._now())
                self._noticed(HostLeaving(self._names[id], Notice("Ray drains its node", left_s)))

    def _hosts(self) -> dict[str, int]:
        return {self._names[id]: len(numbers) for id, numbers in self._decided.seats.items()}

    def _in_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            kept = f"keeping {show(hosts)}" if (hosts := self._hosts()) else "waiting for hosts"
            self._log("warning", f"Ray could not be queried: {trouble}; {kept}")

    async def _pause(self) -> None:
        cost_s = 0.0 if self._latest_look is None else self._latest_look.cost_s
        await self._sleep(max(self._look_s, min(cost_s / BUSY, PAUSE_S)))

    # ---- actions ---------------------------------------------------------------------------------------------------

    async def _act(self, action: Callable[[], None]) -> None:
        """Create or remove claims. If the outcome of a call is unknown, the next check decides again."""
        if self._closing or not (self._decided.make or self._decided.remove):
            return
        try:
            await self._call(action, self._answer_s)
        except RayUnavailable as error:
            self._in_trouble(str(error))

    def _make(self) -> None:
        for number in self._decided.make:
            if self._closing:
                return
            self._cluster.make(
                f"{self._prefix}{number}",
                self._bundle,
                self._wanted.labels,
                detached=self._detached,
            )

    def _remove(self) -> None:
        gone = set(self._decided.remove)
        groups = [] if self._latest_look is None else self._latest_look.groups
        for number, group in numbered(groups, self._prefix):
            if number in gone:
                self._cluster.remove(group.id)

    def _remove_all(self) -> int:
        left = present(self._cluster, self._prefix)
        for _, group in left:
            self._cluster.remove(group.id)
        return len(left)

    async def _shortage(self, at_least: int, placed: int, within_s: float) -> str:
        free: dict[str, float] = {}
        with contextlib.suppress(RayUnavailable):
            free = await self._call(self._cluster.free, self._answer_s)
        look = self._latest_look
        text = placement_groups.shortage(
            at_least=at_least,
            placed=placed,
            within_s=within_s,
            resources=self._wanted.resources,
            free=free,
            nodes=0 if look is None else sum(node.alive for node in look.nodes.values()),
            too_large=look is not None and any(group.infeasible for group in look.groups),
            given=self._given is not None,
            labels=self._wanted.labels,
        )
        trouble = self._trouble or (
            "" if self._whole else "the GPU IDs of some workers are not known yet"
        )
        return f"{text}; last error: {trouble}" if trouble else text


@dataclass(frozen=True)
class _Look:
    claims: list[Claim]
    groups: list[Group]
    nodes: dict[str, Node]
    draining: dict[str, float | None] | None
    gpus: dict[tuple[int, str], str]  # known GPU IDs of placed claims
    problem: str
    cost_s: float


def _stage(group: Group, index: int) -> ClaimStage:
    if group.state == "REMOVED":
        return ClaimStage.GONE
    # While Ray reschedules a group, bundles on live nodes keep their places.
    settled = group.state in ("CREATED", "RESCHEDULING")
    return ClaimStage.PLACED if settled and group.nodes.get(index) else ClaimStage.WAITING


def _ray() -> Cluster:
    try:
        from elastic.driver.ray.discovery_calls import RayCalls
    except ModuleNotFoundError as error:
        raise Invalid(
            "a Ray cluster needs Ray, which is not installed: run pip install 'hvd-elastic[ray]'"
        ) from error
    return RayCalls()
