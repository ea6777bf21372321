"""Engines' connectors: names are translated here, decisions are made in kvstore."""
