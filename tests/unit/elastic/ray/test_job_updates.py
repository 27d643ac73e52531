"""News of a driver to its followers: each once, in order, and the amount of dropped ones."""

from __future__ import annotations

import asyncio

import pytest

from elastic.ray import job_updates as module
from elastic.ray.job_updates import JobUpdate, JobUpdates, UpdateBatch


class Follower:
    """Asks on from where it stands."""

    def __init__(self, news: JobUpdates) -> None:
        self.news = news
        self.source, self.next = "", 0

    async def hears(self, wait_s: float = 0.0) -> UpdateBatch:
        told = await self.news.after(self.source, self.next, wait_s)
        self.source, self.next = told.source, told.next
        return told

    async def values(self) -> list[object]:
        return [value for _, value in (await self.hears()).items]


async def test_updates_are_delivered_once_and_in_order():
    news = JobUpdates()
    follower = Follower(news)
    news.out(b"one\n")
    news.err(b"two\n")
    news.put(JobUpdate("report", {"loss": 1}), 100)
    assert (await follower.hears()).items == [
        JobUpdate("stdout", b"one\n"),
        JobUpdate("stderr", b"two\n"),
        JobUpdate("report", {"loss": 1}),
    ]
    assert await follower.values() == []
    news.out(b"three\n")
    assert await follower.values() == [b"three\n"]


async def test_lost_answer_is_sent_again():
    news = JobUpdates()
    follower = Follower(news)
    news.out(b"one\n")
    await news.after(follower.source, follower.next, 0.0)
    assert await follower.values() == [b"one\n"]


async def test_each_follower_has_its_own_position():
    news = JobUpdates()
    early = Follower(news)
    news.out(b"one\n")
    await early.hears()
    news.out(b"two\n")
    assert await early.values() == [b"two\n"]
    assert await Follower(news).values() == [b"one\n", b"two\n"]


async def test_oldest_updates_are_dropped_and_their_bytes_reported_once():
    news = JobUpdates(limit_bytes=10)
    follower = Follower(news)
    for line in (b"aaaa", b"bbbb", b"cccc", b"dddd"):
        news.out(line)
    heard = await follower.hears()
    assert (heard.lost, [value for _, value in heard.items]) == (8, [b"cccc", b"dddd"])
    assert (await follower.hears()).lost == 0


async def test_updates_received_before_being_dropped_do_not_count_as_lost():
    news = JobUpdates(limit_bytes=10)
    follower = Follower(news)
    news.out(b"aaaa")
    await follower.hears()
    for line in (b"bbbb", b"cccc", b"dddd"):
        news.out(line)
    heard = await follower.hears()
    assert (heard.lost, [value for _, value in heard.items]) == (4, [b"cccc", b"dddd"])


async def test_update_larger_than_the_limit_is_kept_without_older_ones():
    news = JobUpdates(limit_bytes=10)
    news.out(b"a")
    news.out(b"b" * 100)
    heard = await Follower(news).hears()
    assert (heard.lost, heard.items) == (1, [JobUpdate("stdout", b"b" * 100)])


async def test_empty_output_is_no_update():
    news = JobUpdates()
    news.out(b"")
    assert await Follower(news).values() == []


async def test_many_updates_are_delivered_in_parts(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE_BYTES", 8)
    news = JobUpdates()
    follower = Follower(news)
    for line in (b"aaaa", b"bbbb", b"cccc"):
        news.out(line)
    news.out(b"d" * 100)
    assert await follower.values() == [b"aaaa", b"bbbb"]
    assert await follower.values() == [b"cccc"]
    assert await follower.values() == [b"d" * 100]


async def test_a_restarted_driver_starts_from_the_beginning():
    before = JobUpdates()
    follower = Follower(before)
    before.out(b"much of it\n")
    await follower.hears()
    follower.news = JobUpdates()
    follower.news.out(b"new\n")
    heard = await follower.hears()
    assert (heard.lost, heard.items) == (0, [JobUpdate("stdout", b"new\n")])


@pytest.mark.parametrize("end", ["news", "close"])
async def test_waiting_follower_is_woken_by_an_update_or_the_end(end):
    news = JobUpdates()
    waiting = asyncio.create_task(Follower(news).hears(wait_s=60.0))
    await asyncio.sleep(0)  # it waits now
    if end == "news":
        await asyncio.to_thread(news.out, b"at last\n")
    else:
        news.close()
    assert [value for _, value in (await waiting).items] == (
        [b"at last\n"] if end == "news" else []
    )


async def test_waiter_without_updates_times_out_empty():
    assert (await Follower(JobUpdates()).hears(wait_s=0.001)).items == []
