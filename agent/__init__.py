"""hpcwatch: the engine. It imports no collector."""

__version__ = "0.1.0"
