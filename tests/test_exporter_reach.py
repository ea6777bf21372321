"""Whether bytes travel over TCP, which decides who moves them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tiers.nixl.ucx import over_tcp


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0"])  # noqa: S104
def test_within_a_machine_memory_is_shared(host: str) -> None:
    assert not over_tcp(host, "lo")


def test_an_own_address_is_found_without_asking_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    monkeypatch.setattr(socket, "gethostname", lambda: "prefill-3")
    assert not over_tcp("prefill-3", "eth0")
    assert over_tcp("prefill-4", "eth0")


@pytest.mark.parametrize("host", ["fe80::1%\0", f"fe80::1%{'é' * 70}", "fe80::1%none", "\0"])
def test_S2_an_odd_address_of_a_request_is_another_machines(host: str) -> None:
    assert over_tcp(host, "eth0")


def test_S2_without_a_socket_a_machine_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without IPv6, or descriptors."""

    def refuse(*_: object) -> None:
        raise OSError(97, "no such family")

    monkeypatch.setattr(socket, "socket", refuse)
    assert over_tcp("::1", "eth0")


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "another.example"])
@pytest.mark.parametrize(
    ("devices", "tcp"), [("eth0", True), ("mlx5_0:1", False), ("eth0,mlx5_0:1", False)]
)
def test_another_machine_is_reached_over_rdma_where_that_is_chosen(
    tmp_path: Path, host: str, devices: str, tcp: bool
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert over_tcp(host, devices, tmp_path) == tcp
    assert over_tcp(host, devices, tmp_path / "none")
