"""``import light`` before anything that imports torch: see `elastic.chaos.hosts.workers.light_torch`."""

from elastic.chaos.hosts.workers import light_torch  # noqa: F401
