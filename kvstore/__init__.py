"""kvstore: a tiered KV cache service for LLM engines.

This package decides which block lives where; `tiers` holds the bytes and `connectors` speaks
the engines' languages. Imports go one way: connectors -> tiers -> kvstore.
"""

__version__ = "0.1.0"
