"""Addresses that a spec or a command line names. Pure."""

from __future__ import annotations

import ipaddress

__all__ = ["host_and_port", "is_loopback"]


def host_and_port(text: str) -> tuple[str, int]:
    """Of HOST:PORT; an IPv6 address is in brackets. ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} (rule: HOST:PORT)")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can call it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
