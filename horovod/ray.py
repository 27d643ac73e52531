"""Not provided yet: says so at import."""

raise ImportError(
    "horovod.ray is not available in hvd-elastic yet; start workers with horovodrun or horovod.run",
    name="horovod.ray",
)
