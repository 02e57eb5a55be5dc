"""A run's choices, saved and repeated."""

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_stubs import (
    DAMAGED,
    DIRECTIONS,
    PROBLEM,
    Missing,
    Offer,
    Preferred,
    Refusing,
    Stub,
    Times,
    chosen,
    damage,
    impls,
    ran,
)

from gmm_registry import (
    Accepted,
    BackendKey,
    BackendUnavailableError,
    Problem,
    Rejected,
    Tuning,
    autotune,
    explain,
    save_choices,
    use_backend,
    use_choices,
)
from gmm_registry.registry import choice, pins, records, refresh, verdicts
from gmm_registry.registry.records import Machine, Signature


@pytest.fixture
def run(tuned: Tuning, file: Path, tmp_path: Path) -> Path:
    """Save the choices of a run, and forget everything else: the next run would go by the table."""
    path = tmp_path / "run.json"
    impls()
    impls(rows=4096)
    save_choices(path)
    file.unlink()
    refresh()
    return path


def test_a_run_is_repeated(run: Path) -> None:
    assert impls() == ["preferred"] * 3
    use_choices(run)
    assert impls() == ["quick"] * 3
    explanation = explain("cpu", replace(PROBLEM, rows=50))
    assert (explanation.source, explanation.place) == ("file", str(run))
    assert str(explanation).startswith(
        f"float32, 50 rows, weight (4, 8, 16) on cpu (asked for by name in {run}: cpu.quick)\n"
    )
    assert chosen(replace(PROBLEM, rows=4096)) == ("cpu.preferred", "file")
    assert chosen(replace(PROBLEM, k=9)) == ("cpu.preferred", "table")
    with use_backend("eager"):
        assert chosen() == ("any.eager", "use_backend")
    refresh()
    assert chosen() == ("cpu.preferred", "table")


def test_the_file_of_a_run_says_where_each_choice_came_from(run: Path, tmp_path: Path) -> None:
    entries = [(c.signature.direction, c.backend.impl, c.source) for c in records.read(run)]
    assert sorted(entries) == sorted(
        (direction, *found)
        for direction in DIRECTIONS
        for found in (("quick", "cache"), ("preferred", "table"))
    )
    assert {c.distribution for c in records.read(run)} == {"stubs 1.0"}
    assert {c.machine for c in records.read(run)} == {Machine.of(PROBLEM)}
    use_choices(run)
    impls()
    save_choices(tmp_path / "again.json")
    again = records.read(tmp_path / "again.json")
    assert [(c.backend.impl, c.source) for c in again] == [("quick", "file")] * 3


def test_what_was_measured_since_takes_the_place_of_what_was_chosen(
    offer: Offer, times: Times, tmp_path: Path
) -> None:
    offer(preferred=Preferred, quick=Stub)
    times["quick"] = dict.fromkeys(DIRECTIONS, 1.0)
    impls(), autotune(PROBLEM), impls()
    save_choices(tmp_path / "run.json")
    assert {choice.backend.impl for choice in records.read(tmp_path / "run.json")} == {"quick"}


def test_what_is_repeated_takes_the_place_of_what_was_chosen(run: Path, tmp_path: Path) -> None:
    impls()
    use_choices(run)
    save_choices(tmp_path / "again.json")
    assert records.read(tmp_path / "again.json") == []
    impls()
    save_choices(tmp_path / "again.json")
    assert {choice.backend.impl for choice in records.read(tmp_path / "again.json")} == {"quick"}


def test_two_threads_may_forget_a_choice_at_once(offer: Offer, tmp_path: Path) -> None:
    def outdated(signature: Signature, backend: BackendKey) -> bool:
        pins.forget()  # as the other thread does
        return True

    impls()
    pins.unmake(outdated)
    save_choices(tmp_path / "run.json")
    assert records.read(tmp_path / "run.json") == []


class Overtaken(Preferred):
    """While it is asked, another thread finds that it has no kernel."""

    def priority(self, problem: Problem) -> int:
        if not verdicts.refused_late:
            choice.refuse(self.key, problem, "its kernel is gone")
        return 90


def test_a_choice_that_is_outdated_once_made_is_made_again(offer: Offer, tmp_path: Path) -> None:
    offer(overtaken=Overtaken, other=Stub)
    assert impls() == ["other"] * 3
    save_choices(tmp_path / "run.json")
    assert {choice.backend.impl for choice in records.read(tmp_path / "run.json")} == {"other"}


def test_a_late_refusal_is_of_one_device(offer: Offer) -> None:
    offer(stub=Stub)
    key, first, second = BackendKey("cpu", "stub"), replace(PROBLEM, index=0), replace(PROBLEM, index=None)
    choice.refuse(key, first, "no kernel for sm_89")
    refused = verdicts.judge(key, first)
    assert isinstance(refused, Rejected)
    assert refused.reasons == ("no kernel for sm_89",)
    assert isinstance(verdicts.judge(key, second), Accepted)
    choice.forgive([key], second)
    assert isinstance(verdicts.judge(key, first), Rejected)
    choice.forgive([key], first)
    assert isinstance(verdicts.judge(key, replace(PROBLEM, index=0)), Accepted)


def test_a_repeated_choice_comes_before_the_cache(run: Path, times: Times) -> None:
    times["preferred"] = dict.fromkeys(DIRECTIONS, 0.5)
    autotune(PROBLEM)
    assert impls() == ["preferred"] * 3
    use_choices(run)
    assert impls() == ["quick"] * 3


@pytest.mark.parametrize(
    ("plugins", "reason"),
    [({}, "no installed package offers it"), ({"quick": Refusing}, "cpu.quick: closed today")],
)
def test_a_choice_that_cannot_be_repeated_raises(
    run: Path, offer: Offer, plugins: dict[str, type[Stub]], reason: str
) -> None:
    offer(preferred=Preferred, **plugins)
    use_choices(run)
    with pytest.raises(BackendUnavailableError) as caught:
        impls()
    message = str(caught.value)
    assert message.startswith(f"backend 'cpu.quick', asked for by name in {run}, cannot compute {PROBLEM}:")
    assert reason in message
    assert ran == []
    explanation = explain("cpu", PROBLEM)
    assert explanation.chosen is None
    assert reason.removeprefix("cpu.quick: ") in str(explanation)


def test_a_kernel_that_cannot_be_repeated_raises(run: Path, offer: Offer) -> None:
    offer(preferred=Preferred, quick=Missing)
    use_choices(run)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="no kernel for sm_89"):
            impls()


class FewRows(Preferred):
    """It takes 60 rows, and not 64."""

    def rejections(self, problem: Problem) -> list[str]:
        return [] if problem.rows <= 60 else [f"{problem.rows} rows > 60"]


def test_what_rounding_puts_together_is_repeated_too(offer: Offer, tmp_path: Path) -> None:
    offer(few=FewRows, stub=Stub)
    assert (impls(60), impls(64)) == (["few"] * 3, ["stub"] * 3)
    save_choices(tmp_path / "run.json")
    refresh()
    use_choices(tmp_path / "run.json")
    assert (impls(60), impls(64)) == (["few"] * 3, ["stub"] * 3)
    assert explain("cpu", PROBLEM).request == "cpu.few or cpu.stub"


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_malformed_file_is_refused_and_changes_nothing(run: Path, tmp_path: Path, kind: str) -> None:
    use_choices(run)
    other = tmp_path / "other.json"
    damage(other, kind)
    with pytest.raises(ValueError, match=r"other\.json is no file of choices: "):
        use_choices(other)
    assert chosen() == ("cpu.quick", "file")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        use_choices(tmp_path / "nothing.json")
    with pytest.raises(OSError, match="nowhere"):
        save_choices(tmp_path / "nowhere" / "run.json")
