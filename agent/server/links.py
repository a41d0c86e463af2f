"""The open connections of one server: how many there may be, and which one makes room for a new one."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time


class Phase(enum.IntEnum):
    """What a connection is doing. The lower, the sooner it makes room."""

    IDLE = 0  # not one byte of a request is here
    READING = 1  # a request is incomplete, or what follows a refused one is thrown away
    ANSWERING = 2  # never evicted


class Link:
    """One open connection. `phase` and `since_s` (monotonic) change through `LinkTable` only."""

    __slots__ = ("local", "phase", "since_s", "sock")

    def __init__(self, sock: socket.socket, *, local: bool) -> None:
        self.sock = sock
        self.local = local
        self.phase = Phase.IDLE
        self.since_s = time.monotonic()


class LinkTable:
    """All open connections, at most `limit`.

    A full table takes a new connection by closing another: the longest idle one, else the one that has been sending its
    request for longest. So neither idle nor slow clients can shut others out; only answers under way can, and those
    end with the write deadline.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._links: set[Link] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Count the open connections."""
        return len(self._links)

    def admit(self, sock: socket.socket, *, local: bool) -> Link | None:
        """Enter a new connection, closing another if need be; None when all others are being answered."""
        with self._lock:
            if len(self._links) >= self._limit:
                victim = self._next_out()
                if victim is None:
                    return None
                self._evict(victim)
            link = Link(sock, local=local)
            self._links.add(link)
            return link

    def move(self, link: Link, phase: Phase) -> bool:
        """Tell what the connection does from now on. False when it was evicted: its thread must end, answering nothing.

        A request that loses this race was never looked at, so its sender can safely ask again.
        """
        with self._lock:
            if link.phase is not phase:  # a byte now and then makes a slow request no younger
                link.phase = phase
                link.since_s = time.monotonic()
            return link in self._links

    def swap(self, link: Link, sock: socket.socket) -> bool:
        """Put an encrypted socket in the place of the plain one it took over. False when evicted meanwhile."""
        with self._lock:
            link.sock = sock
            return link in self._links

    def drop(self, link: Link) -> None:
        """Forget a connection. Its thread closes the socket after this, never before: see `_evict`."""
        with self._lock:
            self._links.discard(link)

    def evict_all(self) -> None:
        """End every connection, answers under way included."""
        with self._lock:
            for link in tuple(self._links):
                self._evict(link)

    def evict_idlest(self) -> None:
        """End the connection that would make room next, if there is one."""
        with self._lock:
            victim = self._next_out()
            if victim is not None:
                self._evict(victim)

    def _next_out(self) -> Link | None:
        waiting = (link for link in self._links if link.phase is not Phase.ANSWERING)
        return min(waiting, key=lambda link: (link.phase, link.since_s), default=None)

    def _evict(self, link: Link) -> None:
        # Shut down, not closed: this wakes the thread that reads or writes it, which then closes it. Under the lock, a
        # link in the table is known to be unclosed, so the descriptor cannot be somebody else's by now.
        self._links.discard(link)
        with contextlib.suppress(OSError):
            # The plain method even for TLS, whose own would pull the session from under its thread.
            socket.socket.shutdown(link.sock, socket.SHUT_RDWR)
