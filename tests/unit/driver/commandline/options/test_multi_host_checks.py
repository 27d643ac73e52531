"""Multi-host configuration of a job from its flags; every mistake is found before anything starts."""

from __future__ import annotations

import pytest

from elastic.driver.commandline.agent_cli import AgentOptions, agent_bootstrap, agent_parser
from elastic.driver.commandline.options.flags import Options, parse
from elastic.driver.commandline.options.multi_host_checks import etcd_access, fleet_plan
from elastic.driver.job.multi_host_plan import AWAY_S, BOUND_AWAY_S
from elastic.driver.network.secret import make_secret_file
from elastic.errors import Invalid
from harness.golden import raises, recorded
from harness.refusals import refusal_of

HEX = "ab" * 32


def plan(flags: str, environ: dict[str, str] | None = None, *, elsewhere=False, **more: str):
    environ = (environ or {}) | more
    return fleet_plan(parse([*flags.split(), "train"]), environ, elsewhere=elsewhere)


@pytest.mark.parametrize(
    "flags",
    [
        "--standby",
        "--resume",
        "--etcd a:1",
        "--etcd a:1 --job x",
        "--etcd a:1 --job a/b",
        "--etcd a:0 --job x",
        "--etcd-user me",
        "--etcd a --job x --etcd-user me",
        "--etcd a --job x --etcd-cert c",
        "--tls-cert c --tls-key k",
        "--driver-port 70000",
        "--export NOWHERE",
        "--network-interface 1.2",
        "--kubernetes",
        "--kubernetes --job x",
        "--kubernetes --kubernetes-selector=",
        "--kubernetes-namespace lab",
        "--node-notices XIDErrors",
        "--resume --journal no/such/folder/j",
        "--slurm --resume --journal j",
        "--slurm --etcd a --job x",
    ],
)
def test_inconsistent_flags_are_rejected(flags):
    recorded("messages", refusal_of(plan, flags))


def test_single_machine_needs_no_agents():
    assert not plan("").needed
    assert plan("", elsewhere=True).needed


def test_job_without_a_journal_uses_a_new_secret_beside_any_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "None.secret").touch()
    assert not plan("--fresh").given_secret


def test_secret_is_read_from_a_file_or_a_variable_and_hidden_in_the_repr(tmp_path):
    make_secret_file(str(tmp_path / "s"))
    by_file = plan(f"--etcd a --job x --secret-file {tmp_path / 's'}")
    by_variable = plan("--etcd a --job x", ELASTIC_JOB_SECRET=HEX)
    assert len(by_file.secret) == len(by_variable.secret) == 32
    assert by_variable.secret.hex() == HEX
    for found in (by_file, by_variable):
        assert found.secret.hex() not in repr(found) and found.given_secret


def test_secret_is_kept_beside_a_journal_for_the_next_driver(tmp_path):
    flags = f"--resume --journal {tmp_path / 'j'}"
    first, second = plan(flags), plan(flags)
    assert first.secret == second.secret
    assert (tmp_path / "j.secret").stat().st_mode & 0o777 == 0o600


def test_workers_wait_for_a_driver_when_a_successor_is_possible():
    assert plan("", elsewhere=True).away_s == BOUND_AWAY_S
    assert plan("--etcd a --job x --standby", ELASTIC_JOB_SECRET=HEX).away_s == AWAY_S
    made = plan("--etcd a --job x --standby --driver-timeout 7", ELASTIC_JOB_SECRET=HEX)
    assert made.away_s == 7.0


def test_hosts_of_etcd_are_the_registered_ones_unless_a_list_is_given():
    assert plan("--etcd a --job x", ELASTIC_JOB_SECRET=HEX).by_etcd
    assert not plan("--etcd a --job x -H b:1", ELASTIC_JOB_SECRET=HEX).by_etcd


def test_etcd_endpoint_may_have_a_port_and_scheme():
    options = parse(["--etcd", "a,b:1,https://c:2379/,[::1]:5,d", "x"])
    access = etcd_access(options, {})
    assert access is not None
    assert access.endpoints == ["a:2379", "b:1", "c:2379", "[::1]:5", "d:2379"]


def test_etcd_password_is_in_no_repr():
    options = Options(etcd="a", etcd_user="me", etcd_ca="/ca.pem")
    access = etcd_access(options, {"ELASTIC_ETCD_PASSWORD": "hush"})
    assert access is not None and access.password == "hush"
    assert access.tls is not None and (access.tls.cert, access.tls.ca) == ("", "/ca.pem")
    assert "hush" not in repr(access)


def test_remote_workers_inherit_only_training_variables():
    environ = {
        "NCCL_DEBUG": "INFO",
        "HOROVOD_CYCLE_TIME": "1",
        "PYTHONPATH": "/code",
        "AWS_SECRET_ACCESS_KEY": "no",
        "HOME": "/root",
        "WANDB_MODE": "offline",
    }
    assert [*plan("", environ).forwarded] == ["HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "PYTHONPATH"]
    asked = plan("--export WANDB_MODE,HOME", environ).forwarded
    assert asked["WANDB_MODE"] == "offline" and asked["HOME"] == "/root"


def test_pods_are_selected_by_the_release_or_a_label_selector():
    secret = {"ELASTIC_JOB_SECRET": HEX}
    found = plan("--kubernetes --job bert", secret)
    assert found.needed and found.agents_come and found.pods is not None
    labels = "app.kubernetes.io/instance=bert,app.kubernetes.io/component=worker"
    assert (found.pods.selector, found.pods.namespace, found.pods.slots) == (labels, None, None)
    flags = "--kubernetes --kubernetes-selector app=w --kubernetes-namespace lab --slots-per-host 8"
    found = plan(flags, secret)
    assert found.pods is not None
    assert (found.pods.selector, found.pods.namespace, found.pods.slots) == ("app=w", "lab", 8)
    found = plan("--kubernetes --job bert --node-notices XIDErrors,a/b", secret)
    assert found.pods is not None and found.pods.notices == ("XIDErrors", "a/b")


def test_driver_in_a_pod_listens_on_the_pods_address_by_default():
    secret = {"ELASTIC_JOB_SECRET": HEX, "POD_IP": "10.0.0.7"}
    in_pod, explicit = (
        plan(f"--kubernetes --job bert {more}", secret) for more in ("", "--network-interface lo")
    )
    assert in_pod.pods is not None and explicit.pods is not None
    assert (in_pod.pods.address, explicit.pods.address) == ("10.0.0.7", "")


def test_sigterm_ends_only_the_driver_if_another_pod_follows(tmp_path):
    secret = {"ELASTIC_JOB_SECRET": HEX}
    journal = f"--journal {tmp_path / 'j'} --resume"
    assert plan(f"--kubernetes --job bert {journal}", secret).left_by_sigterm
    assert not plan("--kubernetes --job bert", secret).left_by_sigterm
    assert not plan(journal, secret).left_by_sigterm


def agent(flags: str = "", **environ: str):
    own, _ = agent_parser().split(f"--job x --driver a:1 {flags}".split())
    options, _ = agent_parser().parse_known_args(own, namespace=AgentOptions())
    return agent_bootstrap(options, {"ELASTIC_JOB_SECRET": HEX, **environ})


def test_agent_receives_its_grace_period_and_ready_file(tmp_path):
    assert (agent().grace_s, agent().ready_file) == (30.0, "")
    file = str(tmp_path / "ready")
    configured = agent(ELASTIC_GRACE_SECONDS="60", ELASTIC_READY_FILE=file)
    assert (configured.grace_s, configured.ready_file) == (60.0, file)
    assert agent("--grace 90", ELASTIC_GRACE_SECONDS="60").grace_s == 90.0
    with raises(Invalid):
        agent(ELASTIC_GRACE_SECONDS="soon")
    with raises(Invalid):
        agent(f"--ready-file {tmp_path}/none/ready")
