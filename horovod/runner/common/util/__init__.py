"""Functions of Horovod's modules of these names that integrations such as Ray Train use."""
