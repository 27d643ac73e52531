"""The words of log lines, errors and pages that tests of real jobs search for, each defined once.

`tests/unit/test_wording.py` compares them with the product's texts, so that a reworded sentence fails before any job is
started. ``%s`` represents a value that a test knows.
Unit tests compare whole texts instead: see `harness.golden`.
"""

from __future__ import annotations

from elastic.driver.events import ReportRecovery
from elastic.driver.monitoring.world_log_lines import recovery_line
from elastic.driver.reasons import as_sentence


def _begins(kind: str) -> str:
    """What the line about a new world has before its figures, as the product says it now."""
    line = recovery_line(ReportRecovery(1, kind, as_sentence(""), 1, 83.0, {}, 0))
    return line.partition(" 83 ")[0]


# The beginnings of lines that are put together of parts.
CAN_BE_WRITTEN_AGAIN = "checkpoints can be written to"
AS_IN_WORLD_OF_ONE = "act as in a world of size 1"
COULD_NOT_BE_KILLED = "localhost:%d#1 could not be killed"
DERIVED = {"RECOVERED", "CHANGED"}
PRELOADED_PROCESS = "did not use the preloaded process"
RECOVERED = _begins("recovery")
AGENT_ENDS_SIGTERM = "agent exiting: SIGTERM"
ALL_HOLD = "all hold"
ALL_START_FROM_BEGINNING = "all start from the beginning"
ANSWERS_AFTER_SECONDS_START = "responded through .* after 0 seconds: start python"
ANSWERS_AGAIN = "answers again"
ANSWERS_AGAIN_ABOUT_PODS = "answers requests for pods"
ASKING_NAME_SERVER = "using the name server instead"
BECAME_INFINITE_OR_NAN = "became infinite or NaN"
BEGINS_AT_STEP = r"begins at step (\d+)"
START_OVER_FRESH = "start a new job with --fresh"
BELONGS_ANOTHER_USER = "belongs to another user"
BUG_DRIVER = "a bug in the driver"
CALLBACK_REPORTS_RAISED_KEYERROR = "the callback for reports raised KeyError: 'no such column'"
CALL_ONCE = "call the network once"
CANT_BE_SHARED_OUT = "can't be divided evenly"
CANT_BE_WATCHED = "can't be watched"
NO_STEP = "no step completed"
CANT_BE_WRITTEN = "can't be written to"
CANT_BE_WRITTEN_NO = "can't be written: No such file"
CHANGED_WORKERS_LEAVES = _begins("change") + " .* 2 workers: .* leaves"
CHAOS_REPORT = "chaos report"
CODE_RUNS_AFTER_TRAINING = "in code that runs after it"
CLOSED_BEFORE_LOGIN = "delta, or a jump host, closed the connection before the login"
COLLECTIVE_BROKE_AT_LOCALHOST = "a collective failed at localhost:0#1"
COMMIT_DURABLE = "commit %s) is durable"
COMMIT_DURABLE_2 = r"commit \S+ is durable"
COMPUTE_JOB_GONE = "compute job has ended.*%s"
CUT_RANK_CONNECTIONS_CLOSED = "cut: .*, rank 1 of 3 .* [1-9][0-9]* connections closed"
DID_NOT_COME_AFTER = "not injected: 900.0 s after training began: kill"
DISPATCHER_CANT_BE_REACHED = "dispatcher 0 can't be reached.* --network-int"
DRIVER_DOES_NOT_LEAD = "this driver is no longer the leader of .*it exits, and leaves its workers"
DRIVER_PROCESS_NUMBER_WRITES = "the driver with process ID %s writes the journal"
EACH_BIT_UNDISTURBED_RUN = "all are bitwise identical to the undisturbed run"
ELASTICRUN_NP_PYTHON_SCRIPT = "elasticrun -np 2 python script.py"
ELASTIC_RESUMING_FROM = "elastic: resuming from "
ELASTIC_MODEL_WEIGHT_FLOAT = (
    r"^elastic \|   model.0.weight: float32 \[9, 6\] here, float32 \[8, 6\] in the world"
)
ELASTIC_RUN_SURVIVE_LOST = "@elastic.run to survive lost workers"
ELECTED_LEADER = r"elected leader of job .*, term (\d+)"
ENDED_SCRIPT_TRAINED_BEFORE = "exited; only the first elastic.run call of a job is elastic"
ENDS_AT_STEP = "ends at step 60"
ERROR_JOB_ENDS_EXIT = "error: the job ended with exit code 1"
EVERY_WORKER_ENDED_BEFORE = "every worker ended before training began, the last with exit code 7"
EXIT_CODE_RANK_LOCALHOST = r"exit code %s: .*rank %s \(localhost:%s#1 on localhost\).*%s"
FENCING_LOCALHOST_UNDER_COMMIT = (
    r"fencing localhost:1#1: its (.*) at commit (\S+) differs from that of 2 others"
)
FIND_AGAIN = "workers to reconnect"
FORKED_FROM_WORKER = "forked from a worker"
FREEZE_OVER = "freeze .* has ended"
FREE_NODE = "is free on 1 node"
FROZEN_NOBODY_ELSE_TRAINS = "is frozen .*no other worker trains, so it is not killed"
FUNCTION_CANT_BE_PICKLED = "the function can't be pickled"
GENERATION_WORKERS_ENTERING_ELASTIC = (
    r"generation \d+ has 2 workers: training begins in elastic.run|b:0#1 joined"
)
GIVE_RELEASE_SHORTER = "; give (the release|a shorter)"
GIVE_WHOLE_DATASET = "pass the whole dataset"
GOES_AWAY = "will be reclaimed"
GOES_AWAY_AGENT_TOLD = r"127.0.0.2 will be reclaimed in 25 s \(its agent received SIGTERM\)"
GOES_JOB_AT_GENERATION = (
    "resumed the job at generation 2, term 2; waiting for 2 workers to reconnect"
)
GOES_JOB_AT_GENERATION_2 = (
    "resumed the job at generation .*, term 2; waiting for 2 workers to reconnect"
)
GOES_UNCHANGED = "continues unchanged"
GOES_UNCHANGED_RECONNECTED = "continues unchanged: reconnected"
GPU_HANGS_NOT_COME = "its GPU hangs: it launched collective"
INFO_NO_STACKS_LOCALHOST = (
    "info: no stacks of localhost:1#1: it has not called init(), or handles signal 38 itself"
)
INTERPRETER_NAMED_FIRST_LINE = "the interpreter named in its first line is missing"
JOB = "but this job has %s"
JOB_ENDED_EXIT_CODE = "this job ended with exit code 0: all 2 members of generation 2 returned"
JOB_ENDED_EXIT_CODE_2 = "the job ended with exit code 2 before a fault could be injected"
JOB_ENDED_EXIT_CODE_3 = "the job ended with exit code 1"
JOB_ENDED_WELL = "The job succeeded"
JOB_ENDS_EXIT_CODE = "the job ended with exit code 1: .* raised the same exception"
JOB_ENDS_EXIT_CODE_2 = "--reset-limit 1 is reached"
JOB_ENDS_EXIT_CODE_3 = "the job ended with exit code .*localhost:1#1.*signal 9 SIGKILL"
JOB_JOB_ALREADY_GIVE = ": pass another --name"
JOURNAL_ENDS = "ends here"
KEEPS_OTHERS_WAITING = "keeps the others waiting"
KEEPS_OTHERS_WAITING_EVALUATION = "keeps the others waiting .*in the long phase 'evaluation'"
KEEPS_OTHERS_WAITING_UNDER = "keeps the others waiting .*under a debugger: not treated as stuck"
KILLED_SIGKILL = "was killed with SIGKILL"
LEADS_JOB_TEST_TERM = "elected leader of job test, term 1"
LEADS_JOB_TEST_TERM_2 = "elected leader of job test, term 2"
LEAVES_AT_NEXT_COMMIT = "leaves at its next commit"
LEFT_EXIT_CODE = "left with exit code -9"
LEFT_EXIT_CODE_2 = "127.0.0.2:0#1 left with exit code 0"
LEFT_EXIT_CODE_LEFT = "127.0.0.2:0#1 left with exit code 0: 127.0.0.2 left the list of hosts"
LEFT_OUT = "ignored host"
LEFT_WORKER_TRAINED = "it left; 1 worker continued training"
LISTENING = r"listening on \[%s\]:"
LOCALHOST_ENDED_EXIT_CODE = "localhost:1#1 ended with exit code 1; its slot is free in 0.1 s"
LOCALHOST_ENDED_EXIT_CODE_1 = (
    "localhost:1#1 ended with exit code 1 before it trained: ValueError: .*in 0.1 s"
)
LOCALHOST_ENDED_EXIT_CODE_2 = (
    "localhost:1#2 ended with exit code 1 before it trained: ValueError: .*in 0.2 s"
)
LOCALHOST_ENDED_SIGNAL_SIGKILL = "localhost:2#2 ended with signal 9 SIGKILL"
LOCALHOST_GOES_AWAY_AWS = (
    r"localhost will be reclaimed in \d+ s \(AWS will terminate this spot instance\)"
)
LOCALHOST_LEFT_EXIT_CODE = "localhost:0#1 left with exit code 0"
LOCALHOST_LEFT_EXIT_CODE_2 = "localhost:1#1 left with exit code 0: SIGTERM"
LOCALHOST_SIGNAL_SIGKILL_ELASTIC = (
    "localhost:1#1.*signal 9 SIGKILL.*@elastic.run to survive lost workers"
)
LOG_INFO_DRAINS_WORKERS = (
    "^log info: .*-%s drains: its workers leave, and replacements are requested$"
)
LOG_INFO_RAY_ANSWERS = "^log info: Ray answers again$"
LOG_WARNING_ANOTHER_DRIVER = "^log warning .*another driver leads job"
LOG_WARNING_RAY_DOES = "^log warning: Ray could not be queried: .*; keeping "
LOSS_SCALE_LEGACY_KERAS = "a loss scale in legacy Keras"
LOST_HOST_AGENT_NOT = "lost host 127.0.0.2: its agent has not reconnected within 0.5 s"
MACHINE_GOES_AWAY_COMMIT = r"commit (\S+) is durable: rerun the same"
MAX_NP_JOB_BEGAN = "--max-np is 5, the job started with 2"
METRICS_ARE_AT = r"serving metrics at (\S+)"
MS_LATE = "ms late"
NCCL_HANGS_OR_NETWORK = "NCCL or the network hangs"
NEEDS_SESSION = "session is missing"
NEEDS_SIZE = "pass size=hvd"
NEEDS_WORKER_PODS_GO = "needs 2 worker pods to continue"
NEW_AGENT_WORKERS_ONE = "127.0.0.2 has a new agent; the workers of the previous agent were lost"
NONE = "addresses is empty"
NOTES_JSON_NO_FILE = r"notes\.json is not replaced, .* not written by a compute job.*: pass another"
IS_A_FILE = "or one of its parents is a file: "
NOT_EXECUTABLE = "it is not executable"
NOT_FROM_PREPARED_PROCESS = (
    "did not use the preloaded process: its environment differs in OMP_NUM_THREADS"
)
NOT_HEARD = "does not respond"
NOT_HOST_JOB = "is not a host of this job"
NOT_LOCALHOST_JOB = "is not localhost:0#1 of this job"
NOT_MADE_DURABLE = "not written as a checkpoint"
NOT_MADE_UP = "is not made up"
NOT_MEMORY_OFFERED = "no longer refers to the shared memory"
NO_CONFIG_TF_DATA = r"config of (a|the) tf\.data service"
NO_DETACHED_JOB_NAME = "no detached job"
NO_DRIVER_SERVE = "no driver found"
NO_FILE_GIVE_ANOTHER = r"is not replaced, .* \(.*\): pass another file"
NO_JOB_NOBODY_HELM = "has no job nobody; `helm list"
NO_JOB_OTHER_HELM = "has no job other; `helm list"
NO_JOB_USER_RUNS = "no job of this user runs on this machine\n"
NO_JOB_USER_RUNS_2 = "no job of this user runs on this machine"
NO_NODE_LARGE_ENOUGH = "no node is large enough for a worker"
NO_WEIGHTS_YET = "no weights yet"
NO_WORLD_TRAINED_AFTERWARDS = "no world trained afterwards"
ONLY_WORKERS_READY_AFTER = "ready after 2 s: .*--min-np.*--elastic-timeout"
OPTIMIZER_KERAS = "optimizer of Keras 3"
OPTIMIZER_STEP_CALLED_WITHOUT = "optimizer.step() called without optimizer.skip_synchronize()"
OTHERS_MODE_FOLDER_USERS = r"by others \(mode 0620\).* a folder that only this user"
OVER = " was interrupted: "
PAGE_JOB = r"page of this job: (\S+)"
PROCESS_CANT_RUN_CANT = "its process is not running"
PROCESS_NUMBER_WRITES = "process ID %s writes"
PROCESS_SET_REGISTERED_RANKS = (
    r"process set 3 was registered with ranks \[1\] on this worker, but has ranks \[1, 3\]"
)
RAISED_SAME_EXCEPTION = "raised the same exception"
RANK_LOCALHOST_LOCALHOST_EXIT = r"rank 1 \(localhost:1#1 .*exit code 0"
RANK_LOCALHOST_LOCALHOST_KEEPS = (
    r"rank \d \(localhost:1#1 on localhost\) keeps the others waiting in '.*idle"
)
RANK_MEMORY_PROCESS_SHARE = (
    r"rank 1: (the memory of process \d+|shared memory) can't be mapped: .*`ulimit -v`"
)
RANK_NO_DISPATCHER = "rank %s has no dispatcher"
RANK_READY_DEVICE = "rank 1 of 2 is ready on device 2"
RECOVERED_WORKERS = f"{RECOVERED} .* 2 workers"
RECOVERED_WORKERS_2 = f"{RECOVERED} .* 3 workers"
RECOVERED_WORKERS_GENERATION = f"{RECOVERED} .* 3 workers, generation 3"
RECOVERED_WORKERS_GENERATION_2 = f"{RECOVERED} .* 2 workers, generation 3"
RECOVERED_WORKERS_GENERATION_3 = f"{RECOVERED} .* 2 workers, generation 4"
RECOVERIES_MS = "recoveries, in ms"
REFUSED_CONNECTION = "connection from "
RELEASE_QUEUE_NO_JOB = "is a release of queue-0.1.0, not a job"
REMOVED_JOB_JOB_EXIT = "removed job job; exit code 130"
REPLICAS_COPIES_STATE_COMPARED = (
    r"replicas +\d copies of the state compared between workers, 0 differ"
)
REPORTS_WERE_DROPPED = r"(\d+) reports of .* were dropped"
RESET_LIMIT_JOB_BEGAN = "--reset-limit is 3, the job started with not set"
RING_BROKE_WORKERS_TRAINED = "the ring broke; 3 workers continued training"
RUNS_AGAIN = "is running again"
SAID_NOTHING = "has sent nothing for"
SCRIPT_TRAINED_BEFORE = "only the first elastic.run call of a job is elastic"
SECRET_JOB_JOB_GONE = "The Secret job-job is gone, and the running driver"
SHARED_MEMORY = "[X] shared memory"
SIGTERM_AT_DRIVER_COMMIT = MACHINE_GOES_AWAY_COMMIT
SLOT_LOCALHOST_GIVEN_UP = "stopped using slot localhost:1: 5 consecutive workers"
SLOT_LOCALHOST_GIVEN_UP_2 = "stopped using slot localhost:2"
SLOT_LOCALHOST_GIVEN_UP_3 = (
    "stopped using slot localhost:1: 3 consecutive workers ended without progress"
)
SLOT_MAY_RETURN = "slot is available again"
SLOW_OVER = "slow .* has ended"
SO_FROM_STEP_RUN = "the run is not bitwise identical to an undisturbed one from step 4 on"
SPOILT = "have corrupted all replicas"
SSH_FAILED = "ssh to %s failed: "
STANDBY_READY = "standby %s is ready"
STANDING_BY = "standby: another driver leads"
STANDING_ANOTHER_DRIVER_LEADS = "standby: another driver leads job test"
STOPPING_CTRL_AT_DRIVER = "stopping: Ctrl-C at the driver"
TF_DATA_SERVICE_AS = r"with tf_data_service\(\.\.\.\) as address"
THEM_LEAVE = "2 of them leave"
THEM_LEAVE_2 = "5 of them leave"
THERE_NO_SUCH_PROGRAM = "it does not exist"
TORCH_COMPUTES_THREADS_STEP = "torch uses 2 threads in step 3, but used 1 before"
TRACES_STEP = "traces its step (.*)"
TRAINING_CANT_GO_FROM = "training can't resume from the checkpoint: this worker's state differs"
TRAINING_ENDED = "training ended"
TRAINING_RESUMES = "training resumes from "
TRAINING_GOES_FROM = r"training resumes from .*\b%s\b"
TRAINING_GOES_FROM_NEWEST = r"resuming from the newest checkpoint \(restart 1 of 3"
TRAINING_STARTED = "training started after"
TRAINING_GOES_FROM_NEWEST_2 = "resuming from the newest checkpoint"
TRAINING_THREAD = "Training thread"
TRAINING_WENT_SLOWER = "training continued, slower"
VALUE_HOROVODS_CHART = "%s is a value of Horovod's chart: "
VALUE_HOROVODS_CHART_2 = "%s is a value of Horovod's chart: "
WAITING_MORE_WORKER = "waiting for 1 more worker"
WAITING_MORE_WORKER_READY = "waiting for 1 more worker: 1 ready, 2 needed; giving up in 2 s"
WARNING_AGENT_LEFT_KILLED = "warning: the agent on left was killed by signal 9"
WARNING_RANK_LOCALHOST_IS_STRAGGLER = (
    r"warning: straggler: rank \d \(localhost:2#1 .*; the others wait"
)
WARNING_RANK_LOCALHOST_KEEPS = (
    r"warning: rank \d \(localhost:1#1 .* keeps the others waiting .* busy \(CPU"
)
WARNING_WARDEN_PROCESS_DOES = (
    "warning: the orphan reaper is not running: it exited 3 consecutive times"
)
WENT_AFTERWARDS = "continued afterwards"
WORKERS_CPU_EACH_WERE = "100 workers of CPU 1 each were requested, but 8 could be placed"
WORKERS_FIND_AGAIN = "workers to reconnect"
WORKER_CPU_ASKED_COULD = "1 worker of CPU 64 was requested, but 0 could be placed within 1"
WORLDS_ROW_BROKE_NOBODY = "3 consecutive recoveries without a lost worker and without a new commit"
WOULD_END_WITHOUT_POD = "would end without a pod: pass 2 or more"
