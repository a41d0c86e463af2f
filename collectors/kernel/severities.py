"""How bad a code is and what to do: by the table, the site's configuration, and the word in the line."""

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
        if self._is_decided(code, word):
            return Severity.CRITICAL if word == FATAL else Severity.WARNING
        return Severity(self._table.xid(code).severity)

    def action(self, code: int, word: str) -> str:
        """Return what to do about an XID; one severity of a code has one action."""
        if code not in self._overrides and self._is_decided(code, word):
            return "reset" if word == FATAL else "link"
        return self._table.xid(code).action

    def _is_decided(self, code: int, word: str) -> bool:
        return word != "" and self._table.xid(code).by_word

    def sxid(self, code: int, word: str) -> Severity:
        """Return an SXID's severity. The line decides; a code that is harmless stays so where it says Non-fatal."""
        severity = Severity(self._table.sxid(code).severity)
        if word == FATAL:
            return Severity.CRITICAL
        if word == NONFATAL and severity is not Severity.INFO:
            return Severity.WARNING
        return severity
