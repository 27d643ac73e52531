"""Detection of the flags that a training script defines, from its source. Reads files but executes no code."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FILES = 100  # maximum number of modules to read
# maximum number of modules to read in installed packages, which may import thousands of modules
INSTALLED = 10
LARGEST = 1 << 20  # maximum size of a module in bytes
# packages that define no flags for a script, unless the script uses a parser in `_GENERATED`
_WITHOUT_FLAGS = {
    *sys.stdlib_module_names,
    *(
        "accelerate",
        "datasets",
        "elastic",
        "equinox",
        "flax",
        "horovod",
        "jax",
        "keras",
        "lightning",
    ),
    *(
        "matplotlib",
        "mxnet",
        "numpy",
        "optax",
        "pandas",
        "PIL",
        "pyspark",
        "ray",
        "scipy",
        "sklearn",
    ),
    *("tensorflow", "tf_keras", "timm", "torch", "torchvision", "tqdm", "transformers", "yaml"),
}
_PACKAGES = {"site-packages", "dist-packages"}
# parsers that derive flags from parameters or fields of classes, which may be in any package
_GENERATED = re.compile(
    r"\b(HfArgumentParser|LightningCLI|jsonargparse|draccus|hydra|simple_parsing|tyro)\b"
)
# parsers that take each flag with its dashes, so the flag appears literally in the source
_LITERAL = re.compile(r"\badd_argument\(|\bsys\.argv\b|\bclick\.option\(|\bgetopt\(")


class ScriptFlags:
    """Flags of one program.

    Args:
        command: program and arguments, as given by the user.
        module: whether the first word is the name of a module, as after ``-m``.
        path: value of the environment variable PATH.
    """

    def __init__(self, command: Sequence[str], *, module: bool, path: str | None) -> None:
        self._sources = [*_sources(command, module=module, path=path)]

    @property
    def known(self) -> bool:
        """Return whether the source is expected to show all flags of the program."""
        return bool(self._sources) and not any(map(_GENERATED.search, self._sources))

    def defines(self, flag: str) -> bool:
        """Return whether the source may define a flag, such as ``--journal``, or a longer flag that starts with it."""
        name = re.sub("[-_]", "[-_]", flag.lstrip("-"))
        literal, derived = rf"""["'/]--?{name}""", rf"(?<![a-zA-Z0-9]){name}"
        # Other parsers, such as those of Typer, Fire and absl, derive flags from names of variables.
        return any(
            re.search(literal if _LITERAL.search(source) else derived, source)
            for source in self._sources
        )


def _sources(command: Sequence[str], *, module: bool, path: str | None) -> Iterator[str]:
    """Yield the source of a Python program and of the modules that it imports. Yield nothing for other programs."""
    words = [*command]
    if words and not module and os.path.basename(words[0]).startswith("python"):
        words.pop(0)
        while words and words[0].startswith("-"):
            option = words.pop(0)
            if option == "-m":
                module = True
                break
            if option == "-c":
                yield words[0] if words else ""
                return
            if option in ("-W", "-X"):
                words = words[1:]
    if not words:
        return
    roots = [Path(each) for each in ("", *sys.path)]
    if module:
        files = [*_files_of(words[0], roots)]
    else:
        found = words[0] if os.path.isfile(words[0]) else shutil.which(words[0], path=path)
        files = [Path(found)] if found is not None and found.endswith(".py") else []
    roots = [*(file.parent for file in files), *roots]
    seen: set[Path] = set()
    installed = 0
    while files and len(seen) < FILES:
        file = files.pop(0)
        of_package = not _PACKAGES.isdisjoint(file.parts)
        if file in seen or (of_package and installed >= INSTALLED):
            continue
        seen.add(file)
        installed += of_package
        try:
            text = file.read_text() if file.stat().st_size <= LARGEST else ""
        except (OSError, UnicodeDecodeError):
            continue
        yield text
        for name, folder in _imports(text, file.parent):
            files += _files_of(name, roots if folder is None else [folder])


def _imports(text: str, folder: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield the modules that a source imports, each with the folder of a relative import or None."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name, None
        elif isinstance(node, ast.ImportFrom):
            base = [folder, *folder.parents][node.level - 1] if node.level else None
            names = [
                f"{node.module}.{each.name}" if node.module else each.name for each in node.names
            ]
            for name in [*filter(None, [node.module]), *names]:
                yield name, base


def _files_of(name: str, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of a module from the first folder that contains the module."""
    parts = name.split(".")
    if parts[0] in _WITHOUT_FLAGS:
        return
    for root in roots:
        place = root.joinpath(*parts)
        files = (place.with_suffix(".py"), place / "__main__.py", place / "__init__.py")
        found = [file for file in files if file.is_file()]
        if found:
            yield from found
            return
