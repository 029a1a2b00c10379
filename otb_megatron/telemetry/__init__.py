"""Metrics that merge across ranks, phase timing, the sinks they go to, and the report of a run."""
