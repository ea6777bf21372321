"""Measuring the system inside real engines, on any machine: no GPU, no download."""
