"""Hosts with different versions of torch are logged, once each."""

from elastic.driver.membership.torch_versions import Versions
from harness.golden import recorded


def test_single_version_is_not_logged():
    versions = Versions()
    assert versions.record("a", "2.13.0+cpu") == versions.record("b", "2.13.0+cpu") == ""


def test_second_version_is_logged_once_with_the_hosts_of_each():
    versions = Versions()
    versions.record("a", "2.13.0")
    line = versions.record("b", "2.15.0")
    recorded("messages", line)
    assert versions.record("c", "2.15.0") == versions.record("a", "2.13.0") == ""


def test_worker_without_a_version_is_ignored():
    assert Versions().record("a", "") == ""
