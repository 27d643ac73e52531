"""Horovod's names that do not depend on a framework: exceptions, and State without tensors."""
