"""Copies between the KV tensors of an engine and slots: in host memory, and on a GPU."""
