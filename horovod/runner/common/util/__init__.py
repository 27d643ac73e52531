"""Functions from Horovod's modules of the same names, for integrations such as Ray Train."""
