"""Horovod's package for code that is shared by its launcher and its integrations."""
