"""``import light`` before anything that imports torch: see `elastic.chaos.hosts.light_torch`."""

from elastic.chaos.hosts import light_torch  # noqa: F401
