"""Sockets that listen, taken before anything is announced on them."""

import errno
import socket

from service.errors import PortRefusedError


def listening(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of `host`, listening. Blocking: it looks the name up.

    Raises:
        PortRefusedError: the port is in use or not ours to take, or the host is none of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            sockets.append(socket.create_server(address, family=family))
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortRefusedError(f"port {port} on {host} is in use: stop what listens there or give --port") from None
        raise PortRefusedError(f"cannot listen on {host}, port {port} ({error.strerror}): give another --host or --port") from None
    return sockets
