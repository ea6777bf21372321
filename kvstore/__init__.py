"""kvstore: a tiered KV cache service for LLM engines."""

__version__ = "0.1.0"
