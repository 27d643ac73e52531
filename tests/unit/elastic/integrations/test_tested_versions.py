"""Versions of trainer libraries: the tested ones are those that the package claims."""

import re
import warnings
from pathlib import Path

import pytest

from elastic.errors import Invalid
from elastic.integrations.tested_versions import TRIED, check
from with_versions import lower_bounds

CONSTRAINTS = Path(__file__).parents[4] / "constraints.txt"


@pytest.mark.parametrize("package", TRIED)
def test_version_when_older_than_the_tested_ones_then_is_refused(package):
    major, minor, _ = TRIED[package][0].split(".")
    for older in (f"{major}.{int(minor) - 1}.9", f"{int(major) - 1}.99.0"):
        with pytest.raises(Invalid):
            check(package, installed=older)


@pytest.mark.parametrize("package", TRIED)
def test_version_when_newer_than_the_tested_ones_then_causes_a_warning(package):
    major, minor, _ = TRIED[package][1].split(".")
    for newer in (f"{major}.{int(minor) + 1}.0.dev0", f"{int(major) + 1}.0.0"):
        with pytest.warns(UserWarning):
            check(package, installed=newer)


@pytest.mark.parametrize("package", TRIED)
def test_version_when_tested_then_is_accepted_silently(package):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in TRIED[package]:
            check(package, installed=each)


@pytest.mark.parametrize("package", TRIED)
def test_tested_versions_are_the_lower_bound_and_the_pinned_version(package):
    oldest, newest = TRIED[package]
    assert oldest == lower_bounds()[package]
    assert re.search(rf"^{package}=={re.escape(newest)}\b", CONSTRAINTS.read_text(), re.M)
