"""Tests of kvstore; everything that is not marked runs without an engine or a device."""
