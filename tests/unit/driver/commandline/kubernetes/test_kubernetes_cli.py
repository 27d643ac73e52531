"""``elasticrun k8s``: chart values from flags, and rejections before anything is installed."""

from __future__ import annotations

import contextlib
import signal
from unittest.mock import create_autospec

import pytest

from elastic.driver.commandline.kubernetes import kubernetes_cli
from elastic.driver.commandline.kubernetes.kubernetes_cli import (
    KubernetesOptions,
    image_parts,
    kubernetes_parser,
    main,
    values_of,
)
from elastic.driver.commandline.kubernetes.kubernetes_release import (
    AWAY_S,
    ApiSilence,
    ApiSilent,
    ChartRelease,
    NameTaken,
)
from elastic.driver.discovery.kubernetes.api_client import connection
from elastic.errors import Invalid
from harness.golden import raises, recorded
from harness.refusals import refusal_of


def values(line: str):
    own, command = kubernetes_parser().split(line.split())
    options = KubernetesOptions()
    kubernetes_parser().parse_args(own, namespace=options)
    return values_of(options, command)


def test_flags_become_values_of_the_chart():
    found = values("--image reg:5000/train:1.2 --workers 2:8 --gpus 4 -- python train.py --lr 1")
    assert found == {
        "image": {"repository": "reg:5000/train", "tag": "1.2", "digest": ""},
        "job": {"command": ["python", "train.py", "--lr", "1"], "minWorkers": 2},
        "worker": {"number": 8, "gpus": 4},
    }
    assert values("--image a --workers 3 x")["worker"]["number"] == 3


def test_queue_and_jobset_become_values_of_the_chart():
    found = values("--image a --workers 3 --queue team-a --jobset x")
    assert found["kueue"] == {"queue": "team-a"} and found["jobset"] == {"enabled": True}


def test_queued_jobset_needs_no_integration_for_pods(release):
    release.check_queue.return_value = ""
    release.follow.return_value = 0
    with handlers_put_back():
        assert main([*RUN[:1], "--jobset", *QUEUED[1:]]) == 0
    release.check_queue.assert_called_once_with("team-a", pods=False)


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("train", ("train", "latest", "")),
        ("reg:5000/train", ("reg:5000/train", "latest", "")),
        ("a/train:1@sha256:ab", ("a/train", "1", "sha256:ab")),
        ("train@sha256:ab", ("train", "", "sha256:ab")),
    ],
)
def test_image_is_split_into_its_parts(image, parts):
    assert image_parts(image) == parts


@pytest.mark.parametrize(
    "line",
    [
        "--workers 2 x",
        "--image a x",
        "--image a --workers 2",
        "--image a --workers 2: x",
        "--image a --workers 0:2 x",
        "--image a --workers 3:2 x",
        "--image :1 --workers 2 x",
        "--image a:b:c --workers 2 x",
        "--image a@sha256:ab --workers 2 x",
        "--image a --workers 2 --queue Team_A x",
    ],
)
def test_inconsistent_flags_are_rejected(line):
    recorded("messages", refusal_of(values, line))


@pytest.mark.parametrize(
    "words",
    [
        ["frob"],
        ["status"],
        ["scale", "bert"],
        ["status", "bert", "-n", "lab", "more"],
        ["status", "../../x"],
        ["stop", "a" * 46],
        ["run", "--image", "a", "--workers", "2", "--name=-x", "--", "x"],
    ],
)
def test_missing_or_surplus_arguments_are_rejected(words):
    recorded("messages", refusal_of(main, words))


BOTH = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handlers_put_back():
    before = {number: signal.getsignal(number) for number in BOTH}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


RUN = ["run", "--image", "a", "--workers", "2", "--name", "bert", "--", "x"]


@pytest.fixture
def release(monkeypatch):
    found = create_autospec(ChartRelease, instance=True)
    found.name, found.namespace = "bert", "lab"
    found.exists.return_value = False
    monkeypatch.setattr(kubernetes_cli, "ChartRelease", lambda *place: found)
    return found


@pytest.mark.parametrize("pods", ["1.5", "many", "100001", "99999999999999"])
def test_invalid_number_of_pods_is_rejected(release, pods):
    with raises(Invalid):
        main(["scale", "bert", pods])
    release.scale.assert_not_called()


def test_existing_job_is_not_modified(release):
    release.exists.return_value = True
    release.taken.return_value = NameTaken("has a job bert already")
    with raises(Invalid):
        main(RUN)
    release.install.assert_not_called()
    release.uninstall.assert_not_called()


QUEUED = [*RUN[:1], "--queue", "team-a", *RUN[1:]]


def test_job_is_not_installed_without_its_queue(release):
    release.check_queue.side_effect = Invalid("namespace lab has no LocalQueue team-a")
    with handlers_put_back(), raises(Invalid):
        main(QUEUED)
    release.check_queue.assert_called_once_with("team-a", pods=True)
    release.install.assert_not_called()


def test_job_in_an_inactive_queue_is_installed_and_the_reason_is_reported(release, capsys):
    release.check_queue.return_value = "ClusterQueue is stopped"
    release.follow.return_value = 0
    with handlers_put_back():
        assert main(QUEUED) == 0
    release.install.assert_called_once()
    recorded("output", capsys.readouterr().err)


def test_job_installed_concurrently_by_another_process_is_not_removed(release):
    """Both checked before either had installed anything."""
    release.install.side_effect = NameTaken("has a job bert already")
    with handlers_put_back(), raises(NameTaken):
        main(RUN)
    release.uninstall.assert_not_called()


def test_job_continues_after_its_output_is_closed(release, capsys):
    release.follow.side_effect = BrokenPipeError
    with handlers_put_back(), pytest.raises(BrokenPipeError):
        main(RUN)
    release.uninstall.assert_not_called()
    recorded("output", capsys.readouterr().err)


def test_failed_installation_is_removed(release):
    release.install.side_effect = Invalid("helm install failed: too much")
    with handlers_put_back(), raises(Invalid):
        main(RUN)
    release.uninstall.assert_called_once_with(if_there=True)
    release.follow.assert_not_called()


def test_flags_may_follow_the_name(monkeypatch):
    asked = []

    def release(*place):
        asked.append(place)
        raise Invalid("enough")

    monkeypatch.setattr(kubernetes_cli, "ChartRelease", release)
    for words in (["status", "bert", "-n", "lab"], ["status", "-n", "lab", "bert"]):
        with pytest.raises(Invalid, match="enough"):
            main(words)
    assert asked == [("bert", "lab"), ("bert", "lab")]


def test_ctrl_c_removes_the_job_and_a_second_one_does_not_interrupt_the_removal(release):
    handlers = {}

    def uninstall(**_):
        handlers.update({number: signal.getsignal(number) for number in BOTH})

    release.follow.side_effect = release.install.side_effect = KeyboardInterrupt
    release.uninstall.side_effect = uninstall
    for arguments in ({"if_there": True}, {"if_there": False}):
        with handlers_put_back():
            assert main(RUN) == 130
        release.uninstall.assert_called_once_with(**arguments)
        assert handlers == dict.fromkeys(BOTH, signal.SIG_IGN)
        release.uninstall.reset_mock()
        release.install.side_effect = None


def test_failed_removal_is_reported_with_the_command_to_retry(release, capsys):
    release.follow.side_effect = KeyboardInterrupt
    release.uninstall.side_effect = Invalid("helm uninstall failed: no answer")
    with handlers_put_back(), raises(Invalid):
        main(RUN)
    recorded("output", capsys.readouterr().err)


def test_failed_installation_is_reported_even_if_its_removal_fails(release):
    release.install.side_effect = Invalid("helm install failed: first")
    release.uninstall.side_effect = Invalid("helm uninstall failed: second")
    with handlers_put_back(), pytest.raises(Invalid, match="first"):
        main(RUN)


def test_outage_of_the_api_is_logged_once_with_its_end(monkeypatch):
    now = [0.0]
    logged: list[str] = []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    silence = ApiSilence(logged.append)
    silence.over()
    for now[0] in (10.0, 20.0, 10.0 + AWAY_S):
        silence.goes_on(ApiSilent("the API server does not answer (X)"))
    silence.over()
    silence.over()
    recorded("log", logged)
    silence.goes_on(ApiSilent("no answer"))
    now[0] += AWAY_S + 1
    with raises(Invalid):
        silence.goes_on(ApiSilent("no answer"))


@pytest.mark.parametrize(
    "content",
    ["{{{", "[]", "", "kind: Config", "clusters: []\ncontexts: []\nusers: []\ncurrent-context: x"],
)
def test_kubeconfig_without_a_usable_context_is_reported(content, tmp_path, monkeypatch):
    pytest.importorskip("kubernetes")
    from kubernetes.config import kube_config

    file = tmp_path / "config"
    file.write_text(content)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with raises(Invalid):
        connection()
