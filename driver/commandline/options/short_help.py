"""Text of ``elasticrun --help``: one screen with the most common flags."""

from __future__ import annotations

import argparse
from typing import Any

TEXT = """\
usage: elasticrun [flags] program [arguments of the program]

Run a training script on several workers; keep training when workers fail or join.

  elasticrun -np 4 --min-np 2 python train.py           elastic: continue with 2 to 4 workers
  elasticrun -np 8 -H gpu1:4,gpu2:4 python train.py     two machines, reached over ssh

workers
  -np N                        number of workers (default: --min-np)
  --min-np N                   smallest number of workers to continue with; makes the job elastic
  --max-np N                   largest number of workers, also at startup (default: -np)
  --standbys N                 spare workers that replace a lost one immediately (default: 0)
  --reset-limit N              maximum number of recoveries from failures (default: no limit)
hosts
  -H, --hosts LIST             hosts and slots: gpu1:4,gpu2:4 (default: this machine)
  --hostfile FILE              read hosts from a file, one per line: gpu1 slots=4
  --host-discovery-script CMD  program that prints the current hosts, run every second
  --etcd, --kubernetes, --network-interface, --ssh-port, --secret-file: elasticrun docs many-hosts
checkpoints and driver failover
  --checkpoint-dir DIR         shared folder or URL of checkpoints; resume from the newest
  --checkpoint-every EVERY     checkpoint interval: 60s, 10m, 500commits or manual (default: 60s)
  --from DIR@COMMIT, --fresh   start from this commit; start a new job
  --journal FILE               record all events, for elasticrun explain and --resume
  --resume                     continue the job of --journal after a loss of its driver
preemption and failure detection
  --preemption SOURCE          aws, gcp, azure, slurm, a command or off (default: auto)
  --busy-timeout S             kill a busy worker after its peers waited S seconds (default: 600)
  --idle-timeout S             kill an idle worker after its peers waited S seconds (default: 30)
output
  --dashboard :PORT            serve a live page of the job
  --report FILE                write an HTML report of the job when it ends
  --metrics-port PORT          serve Prometheus metrics
  --output-filename DIR        copy the output of each worker to its own file
  --verbose                    log recovery phases and details of decisions
  --strict                     fail on script mistakes and script failures

  --help-all                   all flags, including those of horovodrun and torchrun
  --version, --check-build     print the version, or build information

on a running job: jobs, status, scale, drain, remove, stacks, logs, stop
after a job: explain, replay, checkpoints      setup: doctor, docs, agent, secret, k8s
Help for a command: elasticrun status --help. Documentation: elasticrun docs"""


class ShortHelp(argparse.Action):
    """Action that prints the short help and exits."""

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        print(TEXT)
        parser.exit()
