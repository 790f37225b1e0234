"""The network interface of process groups."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from rl_platform.runtime.ray.process_group import unreachable, use_interface_of

INTERFACES = {
    "lo": [SimpleNamespace(address="127.0.0.1")],
    "docker0": [SimpleNamespace(address="172.17.0.1")],
    "ib0": [SimpleNamespace(address="fe80::1"), SimpleNamespace(address="10.0.0.7")],
}


@pytest.mark.parametrize(
    ("address", "given", "gloo", "nccl"),
    [
        ("10.0.0.7", {}, "ib0", "ib0"),
        ("10.0.0.7", {"NCCL_SOCKET_IFNAME": "eth"}, "ib0", "eth"),
        ("127.0.0.1", {}, "lo", None),
        ("10.9.9.9", {}, None, None),
    ],
)
def test_the_interface_with_the_address_of_the_node(
    monkeypatch: pytest.MonkeyPatch, address: str, given: dict[str, str], gloo: str | None, nccl: str | None
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is removed at the end
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    use_interface_of(address)
    assert (os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")) == (gloo, nccl)


def test_addresses_of_several_machines_are_not_of_the_loopback_interface() -> None:
    here = {"host0": ("a", "127.0.0.1"), "host1": ("a", "127.0.0.1")}
    assert unreachable(here) == []
    assert unreachable({"host0": ("a", "10.0.0.7"), "host1": ("b", "fe80::1"), "host2": ("c", "node-c")}) == []
    found = unreachable({"host0": ("a", "10.0.0.7"), "host1": ("b", "127.0.1.1"), "host2": ("c", "::1")})
    assert [(one.message, one.value) for one in found] == [
        ("other machines cannot reach host1 on b", "127.0.1.1"),
        ("other machines cannot reach host2 on c", "::1"),
    ]
