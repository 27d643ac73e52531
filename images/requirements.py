"""Print the requirements of hvd-elastic with these extras for pip: requirements.py EXTRA,..."""

import sys

import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [extra for extra in sys.argv[1].split(",") if extra]
print(
    *project["dependencies"],
    *(need for extra in extras for need in project["optional-dependencies"][extra]),
    sep="\n",
)
