"""Horovod's package for code that needs no framework, such as exceptions and a state without tensors."""
