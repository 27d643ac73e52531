"""Utility modules with Horovod's names, for integrations such as Ray Train."""
