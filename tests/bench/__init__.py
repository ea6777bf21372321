"""Measuring the connector's halves against a real store, without an engine."""
