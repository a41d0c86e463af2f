"""What devices are called, as the collectors told: one that meets a device by one name learns its others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.api import Device


class Inventory:
    """The devices that each source told of last. A source that told of none since keeps what it had told: names stay
    what they are while a device, or who reads it, fails. Any thread may call.
    """

    def __init__(self) -> None:
        self._told: Mapping[str, Sequence[Device]] = {}

    def put(self, source: str, devices: Sequence[Device]) -> None:
        """Replace what a source told, unless this is nothing."""
        if devices and self._told.get(source) != devices:
            self._told = {**self._told, source: devices}

    def of(self, component: str) -> Sequence[Device]:
        """Return the devices of one component, in the order they were told."""
        return [device for devices in self._told.values() for device in devices if device.component == component]
