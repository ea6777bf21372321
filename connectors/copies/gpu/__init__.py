"""Copies between an engine's KV tensors on a GPU and slots in pinned host memory."""
