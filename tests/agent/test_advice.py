"""Claims about settings that are valid and have less effect than they seem to."""

from __future__ import annotations

import pytest

from agent.advice import advise
from agent.config import Sources, load


def advice(*settings: str) -> list[str]:
    sources = Sources(directory="/nonexistent", default_file="/nonexistent", sets=settings)
    return advise(load(sources, collector_names=[], output_names=[]))


@pytest.mark.parametrize("sku", ["auto", "Standard_ND96asr_v4", "nd96ASR_V4"])
def test_size_that_is_known_needs_no_word(sku: str) -> None:
    assert advice(f"agent.sku={sku}") == []


def test_mistyped_size_is_told_with_the_nearest_one() -> None:
    (line,) = advice("agent.sku=Standard_ND96asr_v44")
    assert "'Standard_ND96asr_v44' is not in the table" in line
    assert line.endswith("did you mean ND96asr_v4?")


def test_size_that_resembles_none_is_told_without_a_guess() -> None:
    (line,) = advice("agent.sku=my-own-cluster")
    assert "did you mean" not in line


def test_names_of_other_agents_have_no_effect_yet_and_that_is_told() -> None:
    assert len(advice("outputs.prometheus.compat=[dcgm]")) == 1
