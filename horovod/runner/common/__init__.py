"""Horovod's package for code that its launcher and its integrations share."""
