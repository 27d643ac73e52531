"""The installed package: two import names, with the driver inside one of them."""

import sys
import zipfile
from pathlib import Path

from harness.program import output_of

ROOT = Path(__file__).parents[3]


# As pip asks the backend for it, but without pip, which takes longer than the build. test_wheel has both.
BUILD = "import sys; from scikit_build_core import build; build.build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"


def test_the_wheel_holds_the_driver_inside_elastic(tmp_path):
    output_of(sys.executable, "-c", BUILD, tmp_path, cwd=ROOT)
    [wheel] = tmp_path.glob("hvd_elastic-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
        commands = archive.read(entry_points).decode()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = dict(
            line.partition(": ")[::2]
            for line in archive.read(metadata).decode().split("\n\n")[0].splitlines()
        )
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"elastic", "horovod"}
    assert {
        "elastic/protocol/messages.py",
        "elastic/driver/commandline/cli.py",
        "horovod/torch/__init__.py",
        "elastic/docs/many-hosts.md",  # for `elasticrun docs`
    } <= names
    assert not [name for name in names if name.startswith("elastic/docs/site/")]
    assert fields.keys() >= {"Author", "Keywords", "Summary", "License-Expression"}
    for command in ("elasticrun", "horovodrun"):
        assert f"{command} = elastic.driver.commandline.__main__:main" in commands or (
            f"{command}=elastic.driver.commandline.__main__:main" in commands
        )
