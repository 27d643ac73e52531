"""Conversion of a configuration file in Horovod's format (``--config-file``) to flags. Makes no decisions.

Every entry is converted to the equivalent flag, so that all values are checked in one place. Flags on the command line
take precedence.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping

import yaml

from elastic.errors import Invalid

_FILE_LIMIT = 1 << 20

_CONTROLLERS = ("gloo", "mpi", "jsrun")


def read_config(path: str, flags: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return the flags that a configuration file sets, each with the location of its entry.

    An example is ``("--log-level=INFO", "job.yaml, logging.level")``.

    Args:
        path: path of the file.
        flags: the flags by section and key. See `ArgumentParser.keys`.

    Raises:
        Invalid: an entry is unknown or has a wrong value. The message names the file and the entry.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file.read(_FILE_LIMIT), Loader=_Loader)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Invalid(
            f"config file {path} can't be read: {reason}. Pass a readable file with --config-file"
        ) from None
    except yaml.YAMLError as error:
        raise Invalid(
            f"config file {path} is not valid YAML: {_in_one_line(error)}. Correct the line"
        ) from None
    except RecursionError:
        raise Invalid(
            f"config file {path} is nested too deeply: write sections of keys and values"
        ) from None
    if content is None:
        return []
    known: dict[str, dict[str, Mapping[str, str]]] = {}
    for full, meant in flags.items():
        title, _, entry = full.partition(".")
        known.setdefault(title, {})[entry] = meant
    words: list[tuple[str, str]] = []
    for name, section in _mapping(content, f"config file {path}").items():
        where = f"config file {path}, {name}"
        if name == "controller":
            if str(section).lower() not in _CONTROLLERS:
                raise Invalid(f"{where} has the unknown controller {section!r}: write gloo")
            words.append((f"--{str(section).lower()}", where))
            continue
        if name not in known:
            raise Invalid(
                f"{where} is an unknown section{_near(name, ['controller', *sorted(known)])}"
            )
        if section is None:
            continue
        for key, value in _mapping(section, where).items():
            if key not in known[name]:
                raise Invalid(f"{where}.{key} is an unknown key{_near(key, list(known[name]))}")
            if value is not None:
                words.append((_flag(known[name][key], value, f"{where}.{key}"), f"{where}.{key}"))
    return words


def _flag(meant: Mapping[str, str], value: object, where: str) -> str:
    if "" not in meant:
        if not isinstance(value, bool):
            raise Invalid(f"{where} is {value!r}: write true or false")
        return meant["true" if value else "false"]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Invalid(f"{where} is {value!r}: write a single number or string")
    return f"{meant['']}={value}"


def _mapping(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Invalid(f"{where} is not a mapping: write entries such as key: value")
    return {str(key): entry for key, entry in value.items()}


def _near(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; use one of {', '.join(known)}"


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, instead of silently using the last one."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _in_one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}: " if mark else ""
    return place + str(getattr(error, "problem", None) or error).replace("\n", " ")
