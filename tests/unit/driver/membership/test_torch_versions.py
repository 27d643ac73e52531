"""Hosts with different versions of torch are named, once each."""

from elastic.driver.membership.torch_versions import Versions
from harness.golden import recorded


def test_one_version_is_no_news():
    versions = Versions()
    assert versions.heard("a", "2.13.0+cpu") == versions.heard("b", "2.13.0+cpu") == ""


def test_another_version_is_told_once_with_who_has_which():
    versions = Versions()
    versions.heard("a", "2.13.0")
    told = versions.heard("b", "2.15.0")
    recorded("messages", told)
    assert versions.heard("c", "2.15.0") == versions.heard("a", "2.13.0") == ""


def test_a_worker_that_tells_none_is_passed_over():
    assert Versions().heard("a", "") == ""
