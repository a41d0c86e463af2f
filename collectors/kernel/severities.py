"""How bad a code is: by the table, the site's configuration, and the word in the line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.api import Severity
from collectors.kernel.lines import FATAL, NONFATAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.hw.xid import XidTable


class Severities:
    """The table with the site's changes. `overrides`: severities by XID, both as text."""

    def __init__(self, table: XidTable, overrides: Mapping[str, str]) -> None:
        self._table = table
        self._overrides = {int(code): Severity(severity) for code, severity in overrides.items()}

    def xid(self, code: int, word: str = "") -> Severity:
        """Return an XID's severity. The line decides for codes of which the table says so."""
        if code in self._overrides:
            return self._overrides[code]
        meaning = self._table.xid(code)
        if meaning.by_word and word:
            return Severity.CRITICAL if word == FATAL else Severity.WARNING
        return Severity(meaning.severity)

    def sxid(self, code: int, word: str) -> Severity:
        """Return an SXID's severity. The line decides; a code that is harmless stays so where it says Non-fatal."""
        severity = Severity(self._table.sxid(code).severity)
        if word == FATAL:
            return Severity.CRITICAL
        if word == NONFATAL and severity is not Severity.INFO:
            return Severity.WARNING
        return severity
