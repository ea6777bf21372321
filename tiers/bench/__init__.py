"""Measuring the tiers against what their medium can do, without a store."""
