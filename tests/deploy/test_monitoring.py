"""deploy/monitoring by itself: rules, their tests, the dashboard, the pages that they name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from monitoring_rig import (
    FOLDER,
    JOB,
    OF_PROMETHEUS,
    ROOT,
    FakeEngine,
    Question,
    chat,
    dashboard,
    load,
    questions_beside_panels,
    questions_of_panels,
    questions_of_rules,
    rules,
    run_promtool,
    threaded_server,
)
from prometheus_client.parser import text_string_to_metric_families

from s2moe.engine.messages import EngineStats, ExpertCache

SEVERITIES = {"critical", "warning", "info"}
ALL_QUESTIONS = [*questions_of_rules(), *questions_of_panels(), *questions_beside_panels()]
KEY = "a-key"
Labels = dict[str, str]


@pytest.fixture(scope="module")
def metrics_texts() -> Iterator[tuple[str, str]]:
    """/metrics of a server with a key: after the engine's first report, and after a request and a refusal."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("S2MOE_API_KEY_FILE", "S2MOE_CONFIG"):
            patch.delenv(name, raising=False)
        with threaded_server(FakeEngine(), api_key=KEY) as rig, httpx.Client(base_url=rig.url) as http:
            no_direct_reads = "the file system does not support direct reads (O_DIRECT)"
            cache = ExpertCache(io="buffered", reader="threads", reason=no_direct_reads)
            rig.metrics.on_stats(EngineStats(expert_cache=cache))
            headers = {"Authorization": f"Bearer {KEY}"}
            at_start = http.get("/metrics", headers=headers).text
            assert http.post("/v1/chat/completions", json=chat(), headers=headers).status_code == 200
            assert http.get("/metrics").status_code == 401
            yield at_start, http.get("/metrics", headers=headers).text


@pytest.fixture(scope="module")
def metrics_text(metrics_texts: tuple[str, str]) -> str:
    return metrics_texts[1]


@pytest.fixture(scope="module")
def exposed(metrics_text: str) -> dict[str, list[Labels]]:
    return series_of(metrics_text)


@pytest.fixture(scope="module")
def exposed_at_start(metrics_texts: tuple[str, str]) -> dict[str, list[Labels]]:
    return series_of(metrics_texts[0])


def series_of(metrics_text: str) -> dict[str, list[Labels]]:
    """Labels of all series, by name, as Prometheus keeps them."""
    found: dict[str, list[Labels]] = {}
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            labels = {**sample.labels, "job": JOB, "instance": "server:8080"}
            found.setdefault(sample.name, []).append(labels)
    return found


def nodes_of(expression: str) -> list[Any]:
    """All nodes of its syntax tree."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return found


def selectors_of(expression: str) -> list[Any]:
    return [each for each in nodes_of(expression) if isinstance(each, promql_parser.VectorSelector)]


def is_selected(labels: Labels, selector: Any) -> bool:
    for matcher in selector.matchers.matchers:
        value = labels.get(matcher.name, "")
        is_pattern = matcher.op in (promql_parser.MatchOp.Re, promql_parser.MatchOp.NotRe)
        fits = bool(re.fullmatch(matcher.value, value)) if is_pattern else value == matcher.value
        if fits == (matcher.op in (promql_parser.MatchOp.NotEqual, promql_parser.MatchOp.NotRe)):
            return False
    return True


@pytest.mark.parametrize("question", ALL_QUESTIONS, ids=lambda each: each.asker)
def test_every_series_that_is_asked_for_exists(question: Question, exposed: dict[str, list[Labels]]) -> None:
    selectors = selectors_of(question.expression)
    assert selectors
    for selector in selectors:
        if selector.name not in OF_PROMETHEUS:
            series = [each for each in exposed.get(selector.name, ()) if is_selected(each, selector)]
            assert series, f"{selector.name}{selector.matchers} is not in /metrics"


@pytest.mark.parametrize("question", ALL_QUESTIONS, ids=lambda each: each.asker)
def test_every_label_that_is_summed_by_exists(question: Question, exposed: dict[str, list[Labels]]) -> None:
    for node in nodes_of(question.expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            names = {each.name for each in selectors_of(node.expr.prettify())}
            labels = {label for name in names for label in exposed[name][0]}
            assert set(node.modifier.labels) <= labels


@pytest.mark.parametrize("question", questions_of_rules(), ids=lambda each: each.asker)
def test_every_series_that_an_alert_counts_is_there_before_anything_happens(
    question: Question, exposed_at_start: dict[str, list[Labels]]
) -> None:
    """Of a series that begins with an event, that event, or a burst of them, is no increase."""
    for node in nodes_of(question.expression):
        if isinstance(node, promql_parser.MatrixSelector):
            selector = node.vector_selector
            series = [each for each in exposed_at_start.get(selector.name, ()) if is_selected(each, selector)]
            assert series, f"{selector.name}{selector.matchers} is not in /metrics of a new server"


def test_threshold_of_each_quantile_is_the_bound_of_a_bucket(exposed: dict[str, list[Labels]]) -> None:
    """Within a bucket, where nothing is known, histogram_quantile() takes a straight line."""
    asked = [each for each in questions_of_rules() if "histogram_quantile" in each.expression]
    assert asked
    for question in asked:
        comparison = promql_parser.parse(question.expression)
        assert isinstance(comparison, promql_parser.BinaryExpr), question
        assert isinstance(comparison.rhs, promql_parser.NumberLiteral), question
        for selector in selectors_of(comparison.lhs.prettify()):
            assert comparison.rhs.val in {float(each["le"]) for each in exposed[selector.name]}, question


def test_a_series_that_does_not_exist_is_noticed(exposed: dict[str, list[Labels]]) -> None:
    for expression in ("s2moe_invented_total", 's2moe_engine_restarts_total{reason="boredom"}'):
        with pytest.raises(AssertionError, match="is not in /metrics"):
            test_every_series_that_is_asked_for_exists(Question("test", expression), exposed)


def test_each_alert_says_what_happened_and_what_to_do_about_it() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in SEVERITIES
        annotations = rule["annotations"]
        assert "{{ $labels.instance }}" in annotations["summary"]
        pages = re.findall(r"(?:docs|deploy)/[\w/-]+\.md(?:#[\w-]+)?", annotations["description"])
        assert pages, f"{rule['alert']} names no page"
        for page in pages:
            path, _, section = page.partition("#")
            titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
            assert not section or section in {slug_of(title) for title in titles}, page


def slug_of(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")


def test_the_page_lists_every_alert_with_its_severity() -> None:
    page = (FOLDER / "README.md").read_text()
    listed = dict(re.findall(r"^\| `(S2moe\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert listed == {rule["alert"]: rule["labels"]["severity"] for rule in rules()}


def test_each_rule_is_tested_to_fire_and_not_to_fire() -> None:
    fires, does_not = set(), set()
    names = {rule["alert"] for rule in rules()}
    for test in load("alerts_test.yml")["tests"]:
        for check in test["promql_expr_test"]:
            labels = " ".join(each["labels"] for each in check["exp_samples"])
            firing = set(re.findall(r'alertname="(\w+)"', labels))
            fires |= firing
            does_not |= {name for name in names - firing if name in test["name"]}
    assert fires == names
    assert does_not == names


def test_promtool_accepts_rules_and_config(tmp_path: Path) -> None:
    assert f"{len(rules())} rules found" in run_promtool("check", "rules", str(FOLDER / "alerts.yml"))
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(FOLDER / name, tmp_path)
    run_promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_rules_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", str(FOLDER / "alerts_test.yml"))


def test_summaries_and_descriptions_can_be_filled_in(tmp_path: Path) -> None:
    tests = load("alerts_test.yml")
    n_alerts = 0
    for test in tests["tests"]:
        checks = [
            {"eval_time": check["eval_time"], "alertname": name, "exp_alerts": []}
            for check in test.pop("promql_expr_test")
            for each in check["exp_samples"]
            for name in re.findall(r'alertname="(\w+)"', each["labels"])
        ]
        test["alert_rule_test"] = checks
        n_alerts += len({check["alertname"] for check in checks})
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    (tmp_path / "test.yml").write_text(yaml.safe_dump(tests))
    # promtool shows the text of alerts that were not expected
    with pytest.raises(AssertionError) as shown:
        run_promtool("test", "rules", str(tmp_path / "test.yml"))
    text = str(shown.value)
    assert text.count("summary=") >= n_alerts >= len(rules())
    for wrong in ("error expanding template", "<no value>", "NaN"):
        assert wrong not in text


def test_promtool_finds_nothing_in_metrics(metrics_text: str) -> None:
    assert run_promtool("check", "metrics", stdin=metrics_text) == ""


def test_dashboard_asks_the_chosen_data_source_for_the_chosen_servers() -> None:
    board = dashboard()
    asking = [panel for panel in board["panels"] if panel["type"] != "row"]
    for each in (*asking, *board["annotations"]["list"]):
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    for panel in asking:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            n_series = len(selectors_of(target["expr"].replace("$__rate_interval", "1m")))
            assert target["expr"].count('{instance=~"$instance"') == n_series, target["expr"]


def test_panels_fill_the_grid_without_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert sum(place["w"] * place["h"] for place in places) == 24 * max(p["y"] + p["h"] for p in places)


def test_compose_mounts_files_that_exist() -> None:
    compose = load("compose.yml")
    for service in compose["services"].values():
        assert not service["image"].endswith("latest")
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = (FOLDER / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert known, volume
    datasource = load("grafana/datasource.yml")["datasources"][0]
    assert datasource["url"].endswith("127.0.0.1:9090")
    assert datasource["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]
    board_folder = load("grafana/dashboards.yml")["providers"][0]["options"]["path"]
    assert any(f":{board_folder}/" in volume for volume in compose["services"]["grafana"]["volumes"])
