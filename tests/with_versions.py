"""Installs other versions of trainer libraries in build/with-..., and prints the folder for PYTHONPATH.

python tests/with_versions.py accelerate-1.4.0     this version
python tests/with_versions.py oldest               all lower bounds of pyproject.toml together

Only the packages that differ from those of this environment are installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOWER_BOUND = re.compile(
    r'^(\w+) = \["(lightning|transformers|accelerate)(?:\[\w+\])?>=([\d.]+)"\]', re.M
)


def lower_bounds() -> dict[str, str]:
    """Return the oldest version of each trainer library that the package claims to support."""
    found = LOWER_BOUND.findall((ROOT / "pyproject.toml").read_text())
    return {library: version for _, library, version in found}


def main() -> None:
    (name,) = sys.argv[1:]
    if name == "oldest":
        wanted = [f"{library}=={version}" for library, version in lower_bounds().items()]
    else:
        wanted = ["==".join(name.rsplit("-", 1))]
    folder = ROOT / "build" / f"with-{name}"
    venv.create(folder, clear=True, with_pip=False)
    # Computed for this folder, as the interpreter in it would.
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    here = sysconfig.get_path("purelib")
    Path(site, "base.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
    print(site)


if __name__ == "__main__":
    main()
