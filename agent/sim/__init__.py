"""Simulated hardware, for demonstrations, tests, benchmarks and authors of plug-ins."""
