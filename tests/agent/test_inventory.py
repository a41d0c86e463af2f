"""Claims about the inventory: who tells what devices are called, and who learns it."""

from __future__ import annotations

from agent.api import Device
from agent.inventory import Inventory
from agent.sim.harness import Probe
from agent.snapshot import Batch, Store
from tests.agent.kit import Scripted

GPU = Device("gpu", "0", uuid="GPU-1", address="0001:00:00.0")
HCA = Device("infiniband", "mlx5_ib0", address="0101:00:00.0")


def published(*devices: Device) -> Store:
    store = Store()
    batch = Batch()
    for device in devices:
        batch.device(device)
    store.put(batch.finish("test", 0.0))
    return store


def test_device_told_in_a_run_is_known_when_the_run_shows() -> None:
    store = published(GPU, HCA)
    assert store.inventory.of("gpu") == [GPU]
    assert store.inventory.of("infiniband") == [HCA]
    assert store.inventory.of("host") == []


def test_names_stay_known_while_their_collector_fails_or_tells_none() -> None:
    store = published(GPU)
    store.drop("test")
    assert store.inventory.of("gpu") == [GPU]
    store.put(Batch().finish("test", 1.0))
    assert store.inventory.of("gpu") == [GPU]


def test_what_a_collector_tells_replaces_what_it_told_and_nothing_of_others() -> None:
    inventory = Inventory()
    inventory.put("one", [GPU])
    inventory.put("other", [HCA])
    renamed = Device("gpu", "1", uuid="GPU-1")
    inventory.put("one", [renamed])
    assert inventory.of("gpu") == [renamed]
    assert inventory.of("infiniband") == [HCA]


def test_run_that_was_refused_tells_nothing() -> None:
    store = Store()
    batch = Batch()
    batch.device(GPU)
    store.evict(batch, "test")
    assert not store.put(batch.finish("test", 0.0), batch)
    assert store.inventory.of("gpu") == []


def test_collector_under_test_knows_the_devices_it_is_given() -> None:
    assert Probe(Scripted, devices=[GPU]).context.devices("gpu") == [GPU]
