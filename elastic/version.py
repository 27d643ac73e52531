"""Version of this package, which must be the same for all agents and drivers of a job."""

__version__ = "0.2.0"
