"""``import light`` before anything that imports torch: see `elastic.chaos.hosts.workers.light_torch`.

Does nothing with ``SHARDED`` in the environment: DTensor needs the modules that a light torch lacks.
"""

import importlib
import os

if "SHARDED" not in os.environ:
    importlib.import_module("elastic.chaos.hosts.workers.light_torch")
