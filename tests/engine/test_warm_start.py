"""With what the expert cache is filled at start."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_experts import LAYOUT, MODEL, FakeExperts

from s2moe.engine.errors import EngineStartError
from s2moe.engine.hot_experts import ModelIdentity, hot_experts_of
from s2moe.engine.messages import Configure
from s2moe.engine.native import NativeError, Status
from s2moe.engine.warm_start import WarmStart

HOT = [[9, 8, 7, 6], [0, 1, 2, 3]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def configure(hot: Path | None = None, *, keep: bool = True, policy: str = "cache") -> Configure:
    path = None if hot is None else str(hot)
    return Configure(
        model_path="m.gguf", hot_experts_path=path, keep_expert_counts=keep, expert_policy=policy
    )


def live(experts: FakeExperts, settings: Configure, n_tokens: int = 0) -> None:
    """A server's life in which as many tokens used experts 0 and 1."""
    start = WarmStart(experts, MODEL, settings)
    start.begin()
    experts.use(n_tokens, 0, 1)
    start.close()


@pytest.fixture
def hot_file(tmp_path: Path) -> Path:
    path = tmp_path / "hot.json"
    path.write_bytes(hot_experts_of(MODEL, (1, 2), HOT, 15).to_json())
    return path


def test_first_start_is_cold(cache: Path) -> None:
    experts = FakeExperts()
    live(experts, configure())
    assert experts.warmed == []


def test_where_all_experts_fit_all_are_read() -> None:
    experts = FakeExperts()
    WarmStart(experts, MODEL, configure(), every_expert_fits=True).begin()
    assert experts.warmed == [[[1, 1, 1, 1]] * 2]


def test_where_all_experts_fit_the_most_used_come_first(hot_file: Path) -> None:
    experts = FakeExperts()
    WarmStart(experts, MODEL, configure(hot_file), every_expert_fits=True).begin()
    first, second = experts.warmed[0]
    assert first == sorted(first, reverse=True)
    assert second == sorted(second)
    assert min(second) > 0


def test_second_start_is_warmed_by_the_first() -> None:
    live(FakeExperts(), configure(), n_tokens=10)
    experts = FakeExperts()
    live(experts, configure())
    assert experts.warmed == [[[10, 10, 0, 0]] * 2]


def test_a_given_list_goes_before_earlier_runs(hot_file: Path) -> None:
    live(FakeExperts(), configure(), n_tokens=10)
    experts = FakeExperts()
    live(experts, configure(hot_file), n_tokens=5)
    assert experts.warmed == [HOT]
    # and what was used meanwhile is kept all the same
    later = FakeExperts()
    live(later, configure())
    assert later.warmed == [[[15, 15, 0, 0]] * 2]


@pytest.mark.parametrize("known", [True, False])
def test_where_every_expert_fits_all_are_read_the_most_used_first(hot_file: Path, known: bool) -> None:
    experts = FakeExperts()
    settings = configure(hot_file if known else None)
    WarmStart(experts, MODEL, settings, every_expert_fits=True).begin()
    (table,) = experts.warmed
    flat = [count for row in table for count in row]
    assert min(flat) > 0
    if known:
        uses = [count for row in HOT for count in row]
        assert sorted(range(8), key=flat.__getitem__) == sorted(range(8), key=uses.__getitem__)


def test_keeping_can_be_turned_off(cache: Path, hot_file: Path) -> None:
    live(FakeExperts(), configure(keep=False), n_tokens=10)
    assert not cache.exists()
    live(FakeExperts(), configure(), n_tokens=10)
    experts = FakeExperts()
    live(experts, configure(keep=False))
    assert experts.warmed == []
    live(experts, configure(hot_file, keep=False))
    assert experts.warmed == [HOT]


def test_list_that_cannot_be_used_refuses_the_start(tmp_path: Path) -> None:
    other = ModelIdentity.of_layout({**LAYOUT, "name": "Other"})
    path = tmp_path / "other.json"
    path.write_bytes(hot_experts_of(other, (1, 2), HOT, 15).to_json())
    for settings in (configure(path), configure(tmp_path / "missing.json")):
        with pytest.raises(EngineStartError) as refused:
            WarmStart(FakeExperts(), MODEL, settings)
        assert refused.value.code == "hot_experts_invalid"
        assert refused.value.message.startswith("--hot-experts: ")
        assert str(settings.hot_experts_path) in refused.value.message


def test_a_cache_that_does_not_want_to_be_warmed_starts_cold(
    hot_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(FakeExperts):
        def warm(self, counts: object) -> None:
            raise NativeError(Status.INVALID, "another shape")

    live(Stubborn(), configure(hot_file))
    assert "another shape" in caplog.text


def test_log_says_what_warms_the_cache(hot_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "s2moe.engine.warm_start")

    def said(settings: Configure, *, fits: bool = False) -> str:
        caplog.clear()
        start = WarmStart(FakeExperts(), MODEL, settings, every_expert_fits=fits)
        start.begin()
        (line,) = caplog.messages
        return line

    assert said(configure()) == (
        "the expert cache starts cold: no --hot-experts and no counts of earlier runs"
    )
    assert said(configure(), fits=True).endswith("every expert is read")
    # of the list's eight counts one is zero
    assert "7 experts were used according to --hot-experts" in said(configure(hot_file))
    assert "first the 7 that were used according to --hot-experts" in said(configure(hot_file), fits=True)
    live(FakeExperts(), configure(), n_tokens=10)
    assert "4 experts were used according to the counts of earlier runs" in said(configure())


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, hot_file: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("s2moe.engine.warm_start.cache_directory", homeless)
    experts = FakeExperts()
    live(experts, configure(hot_file), n_tokens=3)
    assert experts.warmed == [HOT]


# ── --expert-policy static ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("keep", [True, False])
def test_static_without_a_list_is_refused(keep: bool) -> None:
    with pytest.raises(EngineStartError) as refused:
        WarmStart(FakeExperts(), MODEL, configure(keep=keep, policy="static"))
    assert refused.value.code == "hot_experts_missing"
    assert "--expert-policy static" in refused.value.message
    assert "--hot-experts" in refused.value.message


def test_static_takes_the_list_or_the_counts_of_earlier_runs(hot_file: Path) -> None:
    listed = FakeExperts()
    live(listed, configure(hot_file, policy="static"), n_tokens=10)
    kept = FakeExperts()
    live(kept, configure(policy="static"))
    for experts, uses in ((listed, HOT), (kept, [[10, 10, 0, 0]] * 2)):
        (table,) = experts.warmed
        for row, used in zip(table, uses, strict=True):
            assert sorted(range(4), key=row.__getitem__) == sorted(range(4), key=used.__getitem__)
            assert min(row) > 0, "what the list does not name fills the slots that are left"


def test_static_needs_no_list_where_every_expert_fits() -> None:
    experts = FakeExperts()
    WarmStart(experts, MODEL, configure(policy="static"), every_expert_fits=True).begin()
    assert experts.warmed == [[[1, 1, 1, 1]] * 2]


def test_static_warns_that_it_is_for_comparison(hot_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    live(FakeExperts(), configure(hot_file))
    assert "comparison" not in caplog.text
    live(FakeExperts(), configure(hot_file, policy="static"))
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.message.startswith("--expert-policy static is for comparison")
