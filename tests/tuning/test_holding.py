"""What a measured choice holds for, and what comes before it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_stubs import PROBLEM, Missing, Offer, Preferred, Refusing, Stub, chosen, impls, warnings

from gmm_registry import explain, save_choices, use_backend
from gmm_registry.registry.records import Machine, Signature


@pytest.mark.parametrize(
    ("rows", "groups", "rounded"),
    [(64, 4, 16), (46, 4, 16), (90, 4, 16), (91, 4, 32), (45, 4, 8), (1, 32, 1 / 32), (0, 4, 0), (4, 0, 0)],
)
def test_rows_of_a_group_are_rounded(rows: int, groups: int, rounded: float) -> None:
    assert Signature.of(replace(PROBLEM, rows=rows, groups=groups)).rows_per_group == rounded


@pytest.mark.usefixtures("tuned")
def test_a_choice_holds_for_about_as_many_rows() -> None:
    for rows in (46, 64, 90):
        assert impls(rows) == ["quick"] * 3
        assert chosen(replace(PROBLEM, rows=rows)) == ("cpu.quick", "cache")
    others: list[dict[str, Any]] = [
        {"rows": 91},
        {"groups": 3},
        {"k": 7},
        {"n": 17},
        {"dtype": torch.float64},
    ]
    for other in others:
        assert chosen(replace(PROBLEM, **other)) == ("cpu.preferred", "table")


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("field", Machine._fields)
def test_a_choice_is_of_its_device_and_versions(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.of(PROBLEM)
    monkeypatch.setattr(Machine, "of", lambda problem: here._replace(**{field: "another"}))
    assert chosen() == ("cpu.preferred", "table")


@pytest.mark.usefixtures("tuned")
def test_a_choice_is_of_its_backends_version(offer: Offer) -> None:
    offer(version="1.1", preferred=Preferred, quick=Stub)
    assert chosen() == ("cpu.preferred", "table")


@pytest.mark.usefixtures("tuned")
def test_a_backend_that_is_gone_is_not_chosen(offer: Offer) -> None:
    offer(preferred=Preferred)
    assert impls() == ["preferred"] * 3
    assert "quick" not in str(explain("cpu", PROBLEM))


@pytest.mark.usefixtures("tuned")
def test_a_backend_that_refuses_now_is_named(
    offer: Offer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offer(preferred=Preferred, quick=Refusing)
    assert impls() == ["preferred"] * 3
    report = str(explain("cpu", PROBLEM))
    assert f"  cpu.quick: refused, though named by the cache {file}\n    - closed today" in report
    assert report.splitlines()[0].endswith("(automatic choice, from the backends' own table)")
    assert warnings(caplog) == [
        "grouped matmul on cpu (float32) falls back to cpu.preferred, since these refuse:\n"
        "  cpu.quick: closed today"
    ]


@pytest.mark.usefixtures("tuned")
def test_a_kernel_that_is_gone_sends_the_call_to_the_table(offer: Offer, tmp_path: Path) -> None:
    offer(preferred=Preferred, quick=Missing)
    assert impls() == ["preferred"] * 3
    assert "its kernel raised NotImplementedError" in str(explain("cpu", PROBLEM))
    save_choices(tmp_path / "run.json")
    assert "cpu.quick" not in (tmp_path / "run.json").read_text()


@pytest.mark.usefixtures("tuned")
def test_what_is_asked_for_by_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GMM_REGISTRY_BACKEND", "any.eager")
    assert chosen() == ("any.eager", "environment")
    with use_backend("preferred"):
        assert chosen() == ("cpu.preferred", "use_backend")
        assert impls() == ["preferred"] * 3
        assert impls(backend="quick") == ["quick"] * 3


@pytest.mark.usefixtures("tuned")
def test_who_chose_is_printed_and_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gmm_registry"):
        impls()
    assert [record.getMessage() for record in caplog.records] == [
        f"grouped matmul on cpu (float32): cpu.quick, from the cache {file}"
    ]
    first, *rest = str(explain("cpu", PROBLEM)).splitlines()
    assert first == f"{PROBLEM} (automatic choice, from the cache {file})"
    assert rest[:2] == ["  cpu.preferred: accepted, priority 90", "  cpu.quick: chosen, priority 50"]
