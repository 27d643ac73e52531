"""Where Horovod keeps what its launcher and its integrations share."""
