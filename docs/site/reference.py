"""Write the files that are generated from the code: the pages of docs/reference, and the types of keyword arguments.

    python docs/site/reference.py           # write the files
    python docs/site/reference.py --check   # list outdated files, and exit with 1 if there are any

Flags and their help are defined in `driver/commandline`, so these pages show the text of `--help-all`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

import elastic
from elastic.driver.commandline import agent_cli
from elastic.driver.commandline.kubernetes import kubernetes_cli
from elastic.driver.commandline.offline import checkpoints_cli, explain_cli, replay_cli
from elastic.driver.commandline.options import flags
from elastic.driver.commandline.options.argument_parser import (
    FUNCTIONS,
    LAUNCH,
    RAY,
    ArgumentParser,
)
from elastic.driver.commandline.options.keyword_arguments import flag_of, keywords, type_of
from elastic.driver.commandline.running_jobs import job_commands
from elastic.driver.commandline.setup import docs_cli, doctor_cli
from elastic.driver.events import CheckpointMade, WorkerMerged
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.prometheus_metrics import JobMetrics, families
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.protocol.messages import Commit, Worker

sys.path.insert(0, str(Path(__file__).parent))
from python_names import GROUPS, PRELUDE

ROOT = Path(__file__).parents[2]
MADE = "<!-- Made by docs/site/reference.py: do not edit. -->"
# Each command, and its flags. `secret` has none.
COMMANDS: dict[str, Callable[[], ArgumentParser]] = {
    "elasticrun": flags.parser,
    "elasticrun agent": agent_cli.agent_parser,
    "elasticrun k8s": kubernetes_cli.kubernetes_parser,
    "elasticrun checkpoints": checkpoints_cli.parser,
    "elasticrun checkpoints export": checkpoints_cli.export_parser,
    "elasticrun docs": docs_cli.parser,
    "elasticrun doctor": doctor_cli.parser,
    "elasticrun explain": explain_cli.parser,
    "elasticrun replay": replay_cli.parser,
    **{
        f"elasticrun {name}": functools.partial(job_commands.command_parser, name)
        for name in job_commands.VERBS
    },
}


def commands() -> str:
    """Every flag of every command."""
    parts = [
        MADE,
        "# Commands",
        "`horovodrun` is an alias of `elasticrun`. Every command prints its flags with `--help`. `elasticrun` prints"
        " all of its flags with `--help-all`. Flags take precedence over the configuration file (`--config-file`). The"
        " configuration file takes precedence over environment variables, and environment variables over defaults.",
    ]
    for name, parser in COMMANDS.items():
        made = parser()
        parts += [
            f"## {name}",
            f"```\n{(made.usage or '').strip()}\n```",
            _text(made.description or ""),
        ]
        for group in made._action_groups:
            shown = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
            if shown:
                parts += [f"### {name}: {group.title}", _text(group.description or "")]
                parts.append("\n".join(["| flag | meaning |", "|---|---|", *map(_flag, shown)]))
    parts += ["## elasticrun secret", "```\nelasticrun secret FILE\n```", _text(agent_cli.SECRET)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _flag(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = action.metavar
    if value is not None and action.nargs != 0:
        shown = " ".join(value) if isinstance(value, tuple) else value
        names += f" {_cell(shown)}"
    return f"| {names} | {_cell(_text(action.help or ''))} |"


def _text(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def variables() -> str:
    """Environment variables, and keys of the configuration file."""
    parser = flags.parser()
    rows = [
        f"| `{name}` | `{flag}` |"
        for name, flag in sorted({**parser.variables, **parser.switches}.items())
    ]
    keys = [
        f"| `{name}` | {', '.join(f'`{flag}`' + (f' ({when})' if when else '') for when, flag in told.items())} |"
        for name, told in sorted(parser.keys.items())
    ]
    parts = [
        MADE,
        "# Variables and keys",
        "Each variable and each key sets a flag. A flag on the command line takes precedence over its variable and its"
        " key. The value of a switch is 1 or 0.",
        "## Environment variables",
        "\n".join(["| variable | flag |", "|---|---|", *rows]),
        "## Keys of the configuration file",
        "`--config-file FILE` is a YAML file with sections, as in Horovod. Keys are given as `section.key`.",
        "\n".join(["| key | flag |", "|---|---|", *keys]),
        "## Keyword arguments",
        "`elastic.launch`, `elastic.ray.run` and `elastic.ray.Executor` accept these options as keyword arguments. The"
        " help of the flag describes the option.",
        "\n".join(["| keyword | type | flag | functions |", "|---|---|---|---|", *_keyword_rows()]),
        "[Launchers](../launchers.md) lists the variables that other launchers set. [Horovod](../horovod.md) lists the"
        " variables of Horovod that have no effect.",
    ]
    return "\n\n".join(parts) + "\n"


def _keyword_rows() -> Iterator[str]:
    by_function = {function: keywords(function) for function in FUNCTIONS}
    for name, option in {**by_function[LAUNCH], **by_function[RAY]}.items():
        functions = ", ".join(each for each in FUNCTIONS if name in by_function[each])
        typed = type_of(option).replace("|", "\\|")
        yield f"| `{name}` | `{typed}` | `{flag_of(option)}` | {functions} |"


def option_types() -> str:
    """The keyword arguments of `elastic.launch` and `elastic.ray` for static checkers."""
    ray, launch = keywords(RAY), keywords(LAUNCH)
    for name in ray:
        del launch[name]
    parts = [
        f'"""Types of the keyword arguments of functions that start jobs. {MADE[5:-4]}"""\n',
        "from __future__ import annotations\n\nfrom typing import TypedDict\n\n",
        _typed("RayOptions(TypedDict", "`elastic.ray.run` and `Executor`", ray) + "\n",
        _typed("LaunchOptions(RayOptions", "`elastic.launch`", launch),
    ]
    return "\n".join(parts)


def _typed(name: str, function: str, given: Mapping[str, Field[Any]]) -> str:
    lines = [f"    {name}: {type_of(option)}\n" for name, option in given.items()]
    return (
        f'class {name}, total=False):\n    """Keyword options of {function}. The default is None or False."""\n\n'
        + "".join(lines)
    )


def metrics() -> str:
    """Metrics that `--metrics-port` serves."""
    parts = [
        MADE,
        "# Metrics",
        "`--metrics-port` serves these metrics for Prometheus at `/metrics`. In this text, the name of each"
        " counter ends in `_total`.",
        "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *_metric_rows()]),
    ]
    return "\n\n".join(parts) + "\n"


def _metric_rows() -> Iterator[str]:
    figures = JobMetrics(TimeSpent(JobView()))
    # Some names begin with the name of the first metric.
    figures.view.note(CheckpointMade(Commit(1, 1)), [], 0.0)
    figures.view.note(WorkerMerged(Worker("h", 0), 1, 1, 1, 1, []), [], 0.0)
    figures.rates.step = 1
    for at in (0.0, 5.0):
        figures.rates.steps.record(Worker("h", 0), int(at), 1, at)
    for family in families(figures):
        labels = ", ".join(getattr(family, "_labelnames", ()))
        yield f"| `{family.name}` | {family.type} | {labels} | {_cell(family.documentation)} |"


def api() -> str:
    """Every public name of `elastic`, grouped by purpose, with its docstring and an example."""
    homes: dict[str, str] = vars(elastic)["_HOME"]
    parts = [
        MADE,
        "# Python",
        "Every name is available as `elastic.NAME`, and is imported at its first use. `horovod.torch` provides the same"
        " functions and classes under [Horovod's names](../horovod.md). Each example continues the previous examples of"
        " its section. All examples except those that start jobs begin with this code:",
        f"```python\n{PRELUDE}```",
    ]
    for group in GROUPS:
        parts.append(f"## {group.title}")
        for entry in group.entries:
            for name in entry.names.split():
                options = f"    options: {{heading_level: 3, heading: elastic.{name}}}"
                parts.append(f"::: {homes[name]}.{name}\n{options}")
            parts.append(f"```python\n{textwrap.dedent(entry.example).strip()}\n```")
    return "\n\n".join(parts) + "\n"


FILES = {
    "docs/reference/commands.md": commands,
    "docs/reference/variables.md": variables,
    "docs/reference/metrics.md": metrics,
    "docs/reference/python.md": api,
    "elastic/launcher/option_types.py": option_types,
}


def outdated() -> list[str]:
    """Return the paths of outdated files."""
    return [
        path
        for path, make in FILES.items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text() != make()
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        late = outdated()
        if late:
            print(
                f"out of date: {', '.join(late)}; run python docs/site/reference.py",
                file=sys.stderr,
            )
        return bool(late)
    for path, make in FILES.items():
        (ROOT / path).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
