"""Claims about the engine without sockets: presence, plug-ins that fail, reload, derivations (agent.engine)."""

from __future__ import annotations

import json
import logging
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, ClassVar

import pytest

from agent import log
from agent.api import Collector, Event, Kind, Metric, Severity
from agent.config import Sources, load
from agent.config.tree import ConfigError
from agent.engine import Engine
from agent.job import DEVICE_SLACK_S, JobState
from agent.registry import Plugin
from tests.agent.kit import ProcessReading, Reading, Steady, ThreadReading, answers, hangs, recovers, shown, until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from agent.api import Out
    from agent.config.settings import Settings
    from agent.derive import View

NODE_NAME = Metric("node_infiniband_kit_total", Kind.COUNTER, "A name that node_exporter has, too.")


class Talking(Collector):
    """Emits one event and one value under node_exporter's name."""

    name = "kit_talking"
    metrics = (NODE_NAME,)

    def collect(self, out: Out) -> None:
        """Add the value, report the event."""
        out.add(self.ctx.series(NODE_NAME), 1)
        out.event(Event("kit", Severity.INFO, "kit", "hello", labels={"xid": "79"}, time=1.0))


class Site:
    """A node: its folder, its configuration, the engines that run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[Engine] = []
        self.boot("first")

    def boot(self, boot_id: str) -> None:
        random = self.folder / "proc/sys/kernel/random"
        random.mkdir(parents=True, exist_ok=True)
        (random / "boot_id").write_text(boot_id + "\n")

    def plugins(self) -> dict[str, Plugin]:
        classes = (Reading, ThreadReading, ProcessReading, Steady, Talking)
        entries = [EntryPoint(c.name, f"{c.__module__}:{c.__name__}", "hpcwatch.collectors") for c in classes]
        entries.append(EntryPoint("kit_ghost", "no_such_module:Ghost", "hpcwatch.collectors"))
        return {entry.name: Plugin(entry.name, "kit", entry) for entry in entries}

    def settings(self, *sets: str) -> Settings:
        fixed = [f"agent.state_dir={self.folder / 'state'}", "agent.interval=100ms"]
        sources = Sources(
            directory=str(self.folder / "none"),
            default_file=str(self.folder / "none.yaml"),
            sets=[*fixed, *sets],
            sysfs=str(self.folder / "sys"),
            procfs=str(self.folder / "proc"),
        )
        return load(sources, collector_names=list(self.plugins()), output_names=[])

    def reads(self, cls: type[Reading], text: str | None = "1") -> str:
        """Give the collector a file with this content (none: it is absent); return the setting."""
        path = self.folder / cls.name
        if text is None:
            path.unlink(missing_ok=True)
        else:
            answers(path, text)
        return f"collectors.{cls.name}.path={path}"

    def engine(self, *sets: str, look_once: bool = False, only: Collection[str] = ()) -> Engine:
        """Start an engine and wait for its first round."""
        engine = Engine(self.settings(*sets), self.plugins(), child_setup=log.setup, look_once=look_once, only=only)
        self.engines.append(engine)
        engine.start()
        engine.wait_for_first_round()
        return engine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for engine in site.engines:
        engine.stop()


def own(engine: Engine, metric: str, collector: str) -> int | float | None:
    return shown(engine.store, "hpcwatch").get(f'{metric}{{collector="{collector}"}}')


def test_node_without_a_boot_id_is_watched_all_the_same(site: Site) -> None:
    (site.folder / "proc/sys/kernel/random/boot_id").unlink()
    engine = site.engine(site.reads(Steady))
    assert shown(engine.store, "kit_steady") == {"kit_steady_value": 1}


def test_hardware_seen_on_this_boot_is_missed_after_a_restart_of_the_agent(site: Site) -> None:
    site.engine(site.reads(Steady)).stop()
    engine = site.engine(site.reads(Steady, None))
    assert own(engine, "hpcwatch_collector_enabled", "kit_steady") == 1
    assert own(engine, "hpcwatch_collector_up", "kit_steady") == 0
    assert own(engine, "hpcwatch_collector_errors_total", "kit_steady") == 0


def test_hardware_seen_before_a_reboot_is_not_missed(site: Site) -> None:
    site.engine(site.reads(Steady)).stop()
    site.boot("second")
    engine = site.engine(site.reads(Steady, None))
    assert own(engine, "hpcwatch_collector_enabled", "kit_steady") == 0
    assert own(engine, "hpcwatch_collector_up", "kit_steady") is None


def test_hardware_never_seen_is_off_without_an_error(site: Site) -> None:
    engine = site.engine(site.reads(Steady, None))
    assert own(engine, "hpcwatch_collector_enabled", "kit_steady") == 0
    assert own(engine, "hpcwatch_collector_up", "kit_steady") is None


def test_plug_in_that_nobody_mentions_is_off(site: Site) -> None:
    engine = site.engine()
    assert engine.collectors == {}
    assert own(engine, "hpcwatch_collector_enabled", "kit_steady") == 0


def test_plug_in_that_cannot_be_imported_is_down_and_the_others_work(site: Site) -> None:
    engine = site.engine(site.reads(Steady), "collectors.kit_ghost={}")
    job = engine.collectors["kit_ghost"][1]
    assert job.state is JobState.FAILED
    assert "no_such_module" in job.reason
    assert own(engine, "hpcwatch_collector_up", "kit_ghost") == 0
    assert own(engine, "hpcwatch_collector_up", "kit_steady") == 1


def test_looking_once_runs_every_lane_a_single_time_and_keeps_nothing(site: Site) -> None:
    settings = [site.reads(cls) for cls in (Reading, ThreadReading, ProcessReading)]
    engine = site.engine(*settings, "collectors.kit_talking={}", look_once=True)
    values = {name: list(shown(engine.store, name).values()) for name in engine.collectors}
    assert values == {"kit_shared": [1], "kit_thread": [1], "kit_process": [1], "kit_talking": [1]}
    assert [job.runs for _, job in engine.collectors.values()] == [1, 1, 1, 1]
    assert engine.collectors["kit_process"][1].found == "a number in kit_process", "known after one run"
    assert engine.events_total == 1
    assert not (site.folder / "state").exists()


def test_looking_once_can_be_limited_to_a_collector_that_is_off(site: Site) -> None:
    settings = [site.reads(Reading), site.reads(Steady), "collectors.kit_steady.enabled=false"]
    engine = site.engine(*settings, look_once=True, only=["kit_steady"])
    assert list(engine.collectors) == ["kit_steady"]


def test_collector_in_a_process_has_time_for_its_replacement(site: Site) -> None:
    engine = site.engine(site.reads(ProcessReading), "collectors.kit_process.timeout=3s")
    job = engine.collectors["kit_process"][1]
    assert (job.timeout_s, job.times_devices) == (3 + DEVICE_SLACK_S, True)


def test_events_carry_the_sites_labels_and_are_recorded_once(site: Site) -> None:
    engine = site.engine("collectors.kit_talking={}", "agent.labels={cluster: blue}")
    job = engine.collectors["kit_talking"][1]
    until(lambda: job.runs >= 3)
    (event,) = engine.ring.latest()
    assert dict(event.labels) == {"cluster": "blue", "xid": "79"}


def test_node_exporters_names_can_be_left_off_the_page(site: Site) -> None:
    shown_page = site.engine("collectors.kit_talking={}").exposition.page()
    hidden = "outputs.prometheus.names.node_infiniband=false"
    hidden_page = site.engine("collectors.kit_talking={}", hidden).exposition.page()
    assert b"\nnode_infiniband_kit_total 1\n" in shown_page
    assert b"node_infiniband_kit_total" not in hidden_page


def test_first_round_stays_done_when_a_reload_adds_a_collector(site: Site) -> None:
    engine = site.engine(site.reads(Steady))
    added = site.reads(ThreadReading)
    hangs(site.folder / ThreadReading.name)
    engine.reload(site.settings(site.reads(Steady), added, "collectors.kit_thread.timeout=60s"))
    assert engine.collectors["kit_thread"][1].runs == 0
    assert engine.first_round_done
    recovers(site.folder / ThreadReading.name, "1")


def test_reload_keeps_what_is_equal_and_replaces_what_is_not(site: Site) -> None:
    engine = site.engine(site.reads(Steady), site.reads(Reading, "7"))
    steady = engine.collectors["kit_steady"][1]
    engine.reload(site.settings(site.reads(Steady), site.reads(Reading, "7"), "collectors.kit_shared.scale=10"))
    assert engine.collectors["kit_steady"][1] is steady
    until(lambda: shown(engine.store, "kit_shared") == {"kit_shared_value": 70})


def test_reload_of_the_nodes_roots_replaces_every_collector(site: Site) -> None:
    engine = site.engine(site.reads(Steady))
    steady = engine.collectors["kit_steady"][1]
    engine.reload(site.settings(site.reads(Steady), "agent.devfs=/nonexistent"))
    assert engine.collectors["kit_steady"][1] is not steady


def test_reload_of_what_collectors_do_not_see_leaves_them_alone(site: Site) -> None:
    engine = site.engine(site.reads(Steady))
    steady = engine.collectors["kit_steady"][1]
    engine.reload(site.settings(site.reads(Steady), "agent.labels={cluster: blue}"))
    assert engine.collectors["kit_steady"][1] is steady
    assert own(engine, "hpcwatch_collector_up", "kit_steady") == 1


def test_wrong_options_change_nothing(site: Site) -> None:
    engine = site.engine(site.reads(Steady))
    before = engine.settings
    with pytest.raises(ConfigError, match=r"collectors\.kit_steady\.scale"):
        engine.reload(site.settings(site.reads(Steady), "collectors.kit_steady.scale=many"))
    assert engine.settings is before
    job = engine.collectors["kit_steady"][1]
    runs = job.runs
    until(lambda: job.runs > runs)


class Broken:
    """A derivation that fails until it is mended."""

    name: ClassVar[str] = "kit_broken"
    metrics: ClassVar[Sequence[Metric]] = ()

    def __init__(self) -> None:
        self.mended = False
        self.views = 0

    def derive(self, view: View, out: Out) -> None:
        """Fail, or report an event."""
        self.views += 1
        if not self.mended:
            raise ZeroDivisionError
        out.event(Event("kit_derived", Severity.INFO, "kit", "derived", time=2.0))


def test_derivation_that_fails_costs_itself_and_is_told_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = site.engine(site.reads(Steady))
    broken = Broken()
    engine._derivations.insert(0, broken)
    until(lambda: broken.views >= 3)
    assert own(engine, "hpcwatch_collector_up", "kit_steady") == 1
    broken.mended = True
    until(engine.ring.latest)
    told = [record.getMessage() for record in caplog.records if "kit_broken" in record.getMessage()]
    assert told == [
        "derivation kit_broken failed: ZeroDivisionError; its series are gone until it works",
        "derivation kit_broken works again",
    ]


def test_state_of_the_agent_is_kept_where_the_configuration_says(site: Site) -> None:
    site.engine(site.reads(Steady))
    until((site.folder / "state/presence.json").exists)
    kept = json.loads((site.folder / "state/presence.json").read_text())
    assert kept["content"] == {"boot_id": "first", "collectors": ["kit_steady"]}


@pytest.mark.parametrize("spoil", ["", "{}", '{"version": 1, "content": {"boot_id": "first", "collectors": [3, {}]}}'])
def test_spoilt_memory_of_what_was_here_is_lived_with(site: Site, spoil: str) -> None:
    (site.folder / "state").mkdir()
    (site.folder / "state/presence.json").write_text(spoil)
    engine = site.engine(site.reads(Steady, None))
    assert own(engine, "hpcwatch_collector_enabled", "kit_steady") == 0


def test_stopping_closes_every_collector(site: Site) -> None:
    diary = site.folder / "diary"
    classes = (Reading, ThreadReading, Steady)
    settings = [text for c in classes for text in (site.reads(c), f"collectors.{c.name}.diary={diary}")]
    engine = site.engine(*settings)
    engine.stop()
    assert sorted(diary.read_text().splitlines()) == sorted(
        f"{c.name} {what}" for c in classes for what in ("open", "close")
    )


def test_absence_is_told_apart_from_failure(site: Site) -> None:
    engine = site.engine(site.reads(Steady, None), site.reads(Reading, "boom"))
    states = {name: job.state for name, (_, job) in engine.collectors.items()}
    assert states == {"kit_steady": JobState.ABSENT, "kit_shared": JobState.FAILED}
