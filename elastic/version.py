"""The version of this package. Agents and drivers of one job have the same."""

__version__ = "0.2.0"
