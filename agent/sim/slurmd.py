"""A simulated slurmd's log: the lines of jobs on this node, as slurmd and slurmstepd 25.11 write them at `info`."""

from __future__ import annotations

from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_UID = 10001
_VERSION = "25.11.7"


class SlurmdLog:
    """Appends lines. Stamps are the node's local time, in `zone`."""

    def __init__(self, path: Path, zone: tzinfo) -> None:
        self._path = path
        self._zone = zone
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    def write(self, wall_s: float, *texts: str) -> None:
        """Append lines of that time, in seconds since the epoch."""
        stamp = datetime.fromtimestamp(wall_s, self._zone).isoformat(timespec="milliseconds")[:23]
        with self._path.open("a", encoding="utf-8") as log:
            log.writelines(f"[{stamp}] {text}\n" for text in texts)

    def daemon_started(self, wall_s: float) -> None:
        """Write that slurmd started."""
        started = datetime.fromtimestamp(wall_s, self._zone).strftime("%a, %d %b %Y %H:%M:%S %z")
        self.write(wall_s, f"slurmd version {_VERSION} started", f"slurmd started on {started}")

    def job_started(self, wall_s: float, job: int, tasks: int) -> None:
        """Write that a batch job and its one step of so many tasks started."""
        started = datetime.fromtimestamp(wall_s, self._zone).isoformat(timespec="seconds")[:19]
        self.write(
            wall_s,
            f"Launching batch JobId={job} SLUID={_sluid(job)} for UID {_UID}",
            f"[{job}.batch] starting 1 tasks",
            f"[{job}.batch] task 0 ({process_of(job, -1)}) started {started}",
            f"launch task StepId={job}.0 request from UID:{_UID} GID:{_UID} HOST:10.0.0.4 PORT:{40000 + job % 20000}",
            f"[{job}.0] starting {tasks} tasks",
            *(f"[{job}.0] task {task} ({process_of(job, task)}) started {started}" for task in range(tasks)),
        )

    def task_killed(self, wall_s: float, job: int, task: int) -> None:
        """Write that a signal ended a task: its abort after a GPU error, say."""
        self.write(wall_s, f"[{job}.0] task {task} ({process_of(job, task)}) exited. Killed by signal 6.")

    def job_ended(self, wall_s: float, job: int, tasks: list[int], exit_code: int = 0) -> None:
        """Write that the job ended; `tasks` are those that still ran. 1 as the exit code is a job that failed."""
        status = exit_code << 8  # as wait(2) gives it
        done = (
            f"stepd_cleanup: done with step (step_rc: {status}, slurm_rc: 0 - No error)" if status else "done with step"
        )
        self.write(
            wall_s,
            *(f"[{job}.0] task {task} ({process_of(job, task)}) exited with exit code {exit_code}." for task in tasks),
            f"[{job}.0] {done}",
            f"[{job}.batch] task 0 ({process_of(job, -1)}) exited with exit code {exit_code}.",
            f"[{job}.batch] JobId={job} SLUID={_sluid(job)} completed with slurm_rc = 0, job_rc = {status}",
            f"[{job}.batch] {done}",
            f"[{job}.extern] Sent signal 18 to StepId={job}.extern",
            f"[{job}.extern] Sent signal 15 to StepId={job}.extern",
            f"[{job}.extern] done with step",
        )


def _sluid(job: int) -> str:
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # base 32 as Slurm writes it
    tail = "".join(digits[job >> shift & 31] for shift in (15, 10, 5, 0))
    return f"s64HM8NVQ{tail}0"


def process_of(job: int, task: int) -> int:
    """Return the process of a job's task; of the batch script for task -1."""
    return 20_001 + job * 16 % 1_000_000 + task
