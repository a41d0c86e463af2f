"""What a scraper sees of each simulated node is what the goldens in tests/golden say, to the byte."""

from __future__ import annotations

import json
from difflib import unified_diff

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.golden import goldens

ANEW = f"if that is meant to be, write it anew: {goldens.COMMAND}"


@pytest.mark.parametrize("name", goldens.names())
def test_a_simulated_node_shows_what_its_golden_says(name: str) -> None:
    stored = (goldens.FOLDER / name).read_text(encoding="utf-8")
    shown = goldens.text_of(name)
    changes = list(unified_diff(stored.splitlines(), shown.splitlines(), name, "now", n=0, lineterm=""))
    if len(changes) > 40:
        changes[40:] = [f"and {len(changes) - 40} lines more"]
    assert stored == shown, "\n".join([f"{name} is another now; {ANEW}", *changes])


def test_no_golden_is_left_of_what_is_no_more() -> None:
    assert sorted(goldens.stored()) == sorted(goldens.names()), ANEW


@pytest.mark.parametrize("name", [name for name in goldens.names() if name.startswith("pages/")])
def test_the_field_reads_every_page(name: str) -> None:
    page = (goldens.FOLDER / name).read_text(encoding="utf-8")
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert len(samples) == sum(not line.startswith("#") for line in page.splitlines())
    assert all(sample.value >= 0 for sample in samples)


@pytest.mark.parametrize("name", [name for name in goldens.names() if name.endswith(".jsonl")])
def test_events_come_once_and_in_order(name: str) -> None:
    events = [json.loads(line) for line in (goldens.FOLDER / name).read_text(encoding="utf-8").splitlines()]
    assert [event["id"] for event in events] == sorted({event["id"] for event in events})
    assert len({event["key"] for event in events}) == len(events)


def test_a_diff_tells_of_what_comes_goes_and_changes_and_not_of_load() -> None:
    def page(**samples: str) -> str:
        return "".join(f"# HELP {name} H.\n# TYPE {name} gauge\n{lines}" for name, lines in samples.items())

    before = page(
        gpu_gone="gpu_gone 1\n",
        gpu_power_watts='gpu_power_watts{gpu="0"} 300.5\ngpu_power_watts{gpu="1"} 301.5\n',
        gpu_sent_total='gpu_sent_total{gpu="0"} 1000\ngpu_sent_total{gpu="1"} 1000\n',
        gpu_up='gpu_up{gpu="0"} 1\ngpu_up{gpu="1"} 1\n',
    )
    after = page(
        gpu_error='gpu_error{gpu="1"} 1\n',
        gpu_power_watts='gpu_power_watts{gpu="0"} 60.5\n',
        gpu_sent_total='gpu_sent_total{gpu="0"} 960\ngpu_sent_total{gpu="1"} 0\n',
        gpu_up='gpu_up{gpu="0"} 1\ngpu_up{gpu="1"} 0\n',
    )
    assert goldens._difference(before, after, ("before", "after")).splitlines() == [
        "--- before",
        "+++ after",
        "-gpu_gone: all 1",
        "+# HELP gpu_error H.",
        "+# TYPE gpu_error gauge",
        '+gpu_error{gpu="1"} 1',
        '-gpu_power_watts{gpu="1"} 301.5',
        '-gpu_sent_total{gpu="1"} 1000',
        '+gpu_sent_total{gpu="1"} 0',
        '-gpu_up{gpu="1"} 1',
        '+gpu_up{gpu="1"} 0',
    ]
