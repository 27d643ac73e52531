"""What integrations, such as Ray Train's, take from Horovod's modules of these names."""
