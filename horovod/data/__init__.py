"""Base classes for data loaders with a prefetch thread, for scripts that implement their own loader."""

from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
