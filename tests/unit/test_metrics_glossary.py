"""The glossary is complete in itself, and unknown names are refused."""

from __future__ import annotations

from typing import get_args

import pytest

from expert_iteration.metrics.glossary import GLOSSARY, GROUPS, check_names
from expert_iteration.selection import Outcome


def test_every_name_belongs_to_a_group_and_every_group_has_names() -> None:
    assert {name.split("/")[0] for name in GLOSSARY} == set(GROUPS)
    assert all(name.count("/") == 1 for name in GLOSSARY)


def test_every_metric_has_a_unit_and_one_sentence() -> None:
    for name, metric in GLOSSARY.items():
        assert metric.unit, name
        assert metric.meaning.endswith(".") and ". " not in metric.meaning, name
        assert "|" not in metric.meaning, name


def test_every_outcome_of_the_selection_has_a_counter() -> None:
    assert {f"selection/{outcome}_groups" for outcome in get_args(Outcome)} <= GLOSSARY.keys()


def test_unknown_names_are_listed_all_at_once() -> None:
    check_names(["reward/mean", "loss/total"])
    with pytest.raises(ValueError, match="reward/maen, loss/sum"):
        check_names(["reward/maen", "loss/total", "loss/sum"])


def test_names_that_a_task_chooses_are_known_by_their_group() -> None:
    check_names(["parts/closeness", "parts/judge.length", "unscored/timed_out"])
