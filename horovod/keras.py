"""Not provided: says so at import."""

from horovod.absent import refuse

raise refuse("keras", "keep such jobs on horovod, in an environment of their own")
