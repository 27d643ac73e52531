"""Version of this package. All agents and drivers of a job must have the same version."""

__version__ = "0.2.0"
