"""Claims about the command line: what it prints, where, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from agent import __version__
from tests.agent.kit import answers, hangs, plug_in
from tests.agent.running import KIT, Place

if TYPE_CHECKING:
    from pathlib import Path

VERBS = ("run", "once", "collectors", "metrics", "config")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def hpcwatch(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return place.call([sys.executable, "-m", "agent", *arguments])


def reading(place: Place, name: str, text: str = "1", **options: object) -> dict[str, object]:
    answers(place.folder / name, text)
    return {"path": str(place.folder / name), **options}


# Usage


@pytest.mark.parametrize("arguments", [["--version"], ["once", "--version"]], ids=" ".join)
def test_version_is_told(place: Place, arguments: list[str]) -> None:
    done = hpcwatch(place, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hpcwatch {__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_there_for_every_command(place: Place, verb: str) -> None:
    done = hpcwatch(place, verb, "--help")
    assert done.returncode == 0
    assert "--log-level" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["once", "--fly"],
        ["once", "--format", "xml"],
        ["config"],
        ["config", "burn"],
        ["run", "--log-level", "loud"],
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_wrong_usage_is_status_64_and_one_line(place: Place, arguments: list[str]) -> None:
    done = hpcwatch(place, *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert "--help" in done.stderr


@pytest.mark.parametrize(
    "verb", [["run"], ["once"], ["collectors"], ["config", "check"], ["config", "show"]], ids=" ".join
)
def test_wrong_configuration_is_status_78_and_one_line_that_names_file_line_and_key(
    place: Place, verb: list[str]
) -> None:
    place.config.write_text("agent:\n  intervall: 5s\n")
    done = place.call([*place.command(verb[0]), *verb[1:]])
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(f"hpcwatch: {place.config}:2: agent.intervall: unknown key; did you mean interval?")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["run", "once"])
def test_wrong_option_of_a_collector_is_status_78_as_well(place: Place, verb: str) -> None:
    place.configure(kit_steady={"scale": "many"})
    done = place.call(place.command(verb))
    assert (done.returncode, done.stdout) == (78, "")
    assert "collectors.kit_steady.scale: expected a whole number" in done.stderr
    assert done.stderr.count("\n") == 1


def test_configuration_file_that_is_named_must_be_there(place: Place) -> None:
    done = hpcwatch(place, "once", "--config", str(place.folder / "missing.yaml"))
    assert done.returncode == 78
    assert "missing.yaml" in done.stderr
    assert done.stderr.count("\n") == 1


def test_web_configuration_that_is_wrong_is_status_78(place: Place) -> None:
    web = place.folder / "web.yml"
    web.write_text("tls_server_config: {cert_file: /nonexistent, key_file: /nonexistent}\n")
    setting = ["--set", f"outputs.prometheus.web_config={web}"]
    for verb in (["run"], ["config", "check"]):
        done = place.call([*place.command(verb[0]), *verb[1:], *setting])
        assert done.returncode == 78
        assert "outputs.prometheus.web_config" in done.stderr
        assert done.stderr.count("\n") == 1


def test_two_plug_ins_of_one_name_are_status_78_and_both_are_named(place: Place) -> None:
    plug_in(place.folder / "plugins", {"kit_steady": KIT["kit_steady"]}, name="rival")
    done = hpcwatch(place, "metrics")
    assert done.returncode == 78
    assert "kit_steady" in done.stderr
    assert "rival" in done.stderr
    assert done.stderr.count("\n") == 1


# once


def test_once_prints_the_page_on_stdout_and_logs_on_stderr(place: Place) -> None:
    place.configure(kit_steady=reading(place, "steady", "5"), kit_process=reading(place, "process", "6"))
    done = place.call(place.command("once", "--log-level", "info"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "# TYPE kit_steady_value gauge" in lines
    assert "kit_steady_value 5" in lines
    assert "kit_process_value 6" in lines
    assert 'hpcwatch_collector_up{collector="kit_steady"} 1' in lines
    assert "running every" in done.stderr
    assert not (place.folder / "state").exists(), "looking leaves nothing behind"


def test_once_prints_openmetrics(place: Place) -> None:
    place.configure(kit_steady=reading(place, "steady"))
    done = place.call(place.command("once", "--format", "openmetrics"))
    assert done.returncode == 0
    assert done.stdout.endswith("# EOF\n")
    assert "# TYPE hpcwatch_events_recorded counter" in done.stdout


def test_once_prints_json(place: Place) -> None:
    place.configure(kit_steady=reading(place, "steady", str(2**64 - 1)))
    done = place.call(place.command("once", "--format", "json"))
    document = json.loads(done.stdout)
    (metric,) = [metric for metric in document["metrics"] if metric["name"] == "kit_steady_value"]
    assert metric["samples"] == [{"labels": {}, "value": 2**64 - 1}]
    assert {"name": "kit_steady", "state": "ok", "reason": ""} in document["collectors"]


def test_once_of_one_collector_runs_that_one_even_if_it_is_off(place: Place) -> None:
    place.configure(
        kit_steady=reading(place, "steady", enabled=False), kit_shared=reading(place, "shared", "boom", enabled=True)
    )
    done = place.call(place.command("once", "--collector", "kit_steady"))
    assert done.returncode == 0
    assert "kit_steady_value 1" in done.stdout.splitlines()
    assert "kit_shared_value" not in done.stdout


def test_once_of_an_unknown_collector_is_wrong_usage_and_tells_which_there_are(place: Place) -> None:
    done = place.call(place.command("once", "--collector", "gpus", "--collector", "kit_steady"))
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert "gpus" in done.stderr
    assert "kit_steady" in done.stderr


@pytest.mark.parametrize("text", ["boom", "exit"])
def test_once_with_a_failing_collector_is_status_1_and_prints_the_others(place: Place, text: str) -> None:
    place.configure(kit_steady=reading(place, "steady"), kit_shared=reading(place, "shared", text))
    done = place.call(place.command("once"))
    assert done.returncode == 1
    assert "kit_steady_value 1" in done.stdout.splitlines()
    assert 'hpcwatch_collector_up{collector="kit_shared"} 0' in done.stdout.splitlines()
    assert "Traceback" not in done.stderr


def test_once_with_a_hanging_collector_is_status_1_and_ends(place: Place) -> None:
    hangs(place.folder / "thread")
    place.configure(
        kit_steady=reading(place, "steady"), kit_thread={"path": str(place.folder / "thread"), "timeout": "200ms"}
    )
    done = place.call(place.command("once"))
    assert done.returncode == 1
    assert "kit_steady_value 1" in done.stdout.splitlines()
    assert "no answer within 0.2 s" in done.stderr


def test_once_with_a_failed_device_or_absent_hardware_is_status_0(place: Place) -> None:
    place.configure(kit_steady=reading(place, "steady", "part"), kit_shared={"path": str(place.folder / "none")})
    done = place.call(place.command("once"))
    assert done.returncode == 0
    assert 'hpcwatch_collector_enabled{collector="kit_shared"} 0' in done.stdout.splitlines()
    assert "left half: it broke" in done.stderr


def test_once_with_required_hardware_that_is_absent_is_status_1(place: Place) -> None:
    place.configure(kit_shared={"path": str(place.folder / "none"), "enabled": True})
    assert place.call(place.command("once")).returncode == 1


@pytest.mark.parametrize("verb", ["once", "metrics"])
def test_reader_that_has_seen_enough_is_no_error(place: Place, verb: str) -> None:
    command = place.command("once") if verb == "once" else [sys.executable, "-m", "agent", "metrics"]
    with subprocess.Popen(
        command, env=place.environment, cwd=place.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(10) == 0
    assert "Traceback" not in told
    assert "rror" not in told


# collectors, metrics


def test_collectors_are_listed_with_what_they_need_and_found(place: Place) -> None:
    place.configure(
        kit_steady=reading(place, "steady"),
        kit_process=reading(place, "process"),
        kit_shared={"path": str(place.folder / "none")},
        kit_thread=reading(place, "thread", "boom"),
    )
    done = place.call(place.command("collectors", "--json"))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {name: row["state"] for name, row in rows.items() if name.startswith("kit_")} == {
        "kit_steady": "ok",
        "kit_process": "ok",
        "kit_shared": "absent",
        "kit_thread": "failed",
        "kit_devices": "off",
    }
    assert rows["kit_steady"]["found"] == "a number in steady"
    assert rows["kit_process"]["found"] == "a number in process"
    assert rows["kit_steady"]["needs"] == "a file"
    table = place.call(place.command("collectors"))
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.splitlines()[0].split() == ["COLLECTOR", "STATE", "NEEDS", "FOUND"]
    assert any(line.split()[:2] == ["kit_thread", "failed"] and "boom" in line for line in table.stdout.splitlines())


def test_metrics_are_listed_in_three_forms(place: Place) -> None:
    rows = json.loads(hpcwatch(place, "metrics", "--format", "json").stdout)
    keys = {"name", "type", "unit", "labels", "help", "collector", "stability"}
    assert all(keys <= set(row) for row in rows)
    (row,) = [row for row in rows if row["name"] == "kit_device_value"]
    assert (row["type"], row["unit"], row["labels"], row["collector"]) == ("gauge", "bytes", ["device"], "kit_devices")
    names = [row["name"] for row in rows]
    assert names == sorted(names)
    assert "hpcwatch_build_info" in names
    table = hpcwatch(place, "metrics").stdout
    assert len(table.splitlines()) == len(rows) + 1
    markdown = hpcwatch(place, "metrics", "--format", "markdown").stdout
    assert all(f"| `{name}` |" in markdown for name in names)


def test_plug_in_that_cannot_be_imported_is_told_and_the_rest_is_listed(place: Place) -> None:
    plug_in(place.folder / "plugins", {"kit_ghost": "no_such_module:Ghost"}, name="ghost")
    done = hpcwatch(place, "metrics", "--format", "json")
    assert done.returncode == 0
    assert "kit_device_value" in {row["name"] for row in json.loads(done.stdout)}
    assert "kit_ghost" in done.stderr
    assert "Traceback" not in done.stderr


# config


def test_valid_configuration_is_called_valid(place: Place) -> None:
    place.configure(kit_steady={"path": "/x"})
    done = place.call([*place.command("config"), "check"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "configuration is valid\n", "")


def test_effective_configuration_is_shown_as_yaml_and_means_the_same_again(place: Place) -> None:
    place.configure(kit_steady={"path": "/x", "scale": 3})
    first = place.call([*place.command("config"), "show"])
    assert first.returncode == 0
    shown = yaml.safe_load(first.stdout)
    assert shown["collectors"]["kit_steady"]["scale"] == 3
    assert shown["agent"]["sysfs"] == str(place.folder / "sys")
    place.config.write_text(first.stdout)
    second = place.call([*place.command("config"), "show"])
    assert yaml.safe_load(second.stdout) == shown


def test_default_configuration_is_valid_and_changes_nothing(place: Place) -> None:
    place.quiet.write_text("")
    place.config.write_text("")
    before = yaml.safe_load(place.call([*place.command("config"), "show"]).stdout)
    written = place.call([*place.command("config"), "init"])
    assert written.returncode == 0
    assert "#" in written.stdout
    place.config.write_text(written.stdout)
    done = place.call([*place.command("config"), "check"])
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(place.call([*place.command("config"), "show"]).stdout) == before


# Where nothing can be printed, and where nothing is sent


@pytest.mark.parametrize("arguments", [["metrics"], ["config", "init"]], ids=" ".join)
def test_full_disk_behind_standard_output_is_one_line_and_status_1(place: Place, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            [sys.executable, "-m", "agent", *arguments],
            env=place.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    told = done.stderr.splitlines()[-1]
    assert (done.returncode, told) == (1, "hpcwatch: cannot write to standard output: No space left on device")
    assert "Traceback" not in done.stderr


def test_closed_standard_output_is_one_line_and_status_1(place: Place) -> None:
    command = f"exec {sys.executable} -m agent metrics >&-"
    done = place.call(["/bin/sh", "-c", command])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "hpcwatch: cannot write to standard output: Bad file descriptor"


def test_looking_once_says_nothing_when_all_is_well_and_running_tells_what_runs(place: Place) -> None:
    place.configure(kit_shared=reading(place, "five", "5"))
    assert place.call(place.command("once")).stderr == ""
    assert "default: warning" in hpcwatch(place, "once", "--help").stdout
    assert "default: info" in hpcwatch(place, "run", "--help").stdout


def test_setting_that_is_no_assignment_is_wrong_usage(place: Place) -> None:
    done = hpcwatch(place, "once", "--set", "agent.interval")
    assert done.returncode == 64
    assert "expected KEY=VALUE" in done.stderr


def test_pushing_without_an_output_that_sends_is_told(place: Place) -> None:
    done = place.call(place.command("once", "--push"))
    assert done.returncode == 0
    assert "no output that sends is configured" in done.stderr
