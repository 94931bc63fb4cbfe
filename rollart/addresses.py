"""Addresses in specs and command lines. Pure."""

from __future__ import annotations

import ipaddress

__all__ = ["host_and_port", "is_loopback"]


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 address is in brackets. ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} (rule: HOST:PORT)")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True if the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
