"""Settings: layers, limits and one-line errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2moe.server.settings import (
    Settings,
    SettingsError,
    env_of,
    flag_of,
    load_settings,
    parse_size_bytes,
    unknown_variables,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "s2moe.toml"


def test_layers_win_in_order(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({}).port == 8080
    config.write_text('port = 1001\nhost = "10.0.0.1"\nqueue_size = 3\n')
    assert load_settings({}, config).port == 1001
    monkeypatch.setenv("S2MOE_PORT", "1002")
    monkeypatch.setenv("S2MOE_HOST", "10.0.0.2")
    settings = load_settings({"port": "1003"}, config)
    assert (settings.port, settings.host, settings.queue_size) == (1003, "10.0.0.2", 3)


def test_config_file_may_be_named_in_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("port = 1001\n")
    monkeypatch.setenv("S2MOE_CONFIG", str(config))
    assert load_settings({}).port == 1001


def test_empty_environment_variable_means_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S2MOE_PORT", "")
    assert load_settings({}).port == 8080


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8MiB", 8 * 2**20),
        ("1500MiB", 1500 * 2**20),
        ("12GiB", 12 * 2**30),
        ("0.5 GiB", 2**29),
        ("4096", 4096),
        ("64kB", 64_000),
        ("2g", 2 * 10**9),
        ("8mib", 8 * 2**20),
        ("10B", 10),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8 apples", "-1MiB", "MiB", "8MiBs", "1e3", "8iB", "8i", "٣MiB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="8MiB"):
        parse_size_bytes(text)


@given(st.integers(0, 2**20), st.sampled_from(["", "B", "kB", "KiB", "MB", "MiB", "GiB"]))
def test_size_of_a_whole_number_is_exact(number: int, unit: str) -> None:
    scale = {"": 1, "B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GiB": 2**30}[unit]
    assert parse_size_bytes(f"{number}{unit}") == number * scale


def test_size_in_toml_may_be_a_number_or_text(config: Path) -> None:
    config.write_text("max_body_size = 4096\n")
    assert load_settings({}, config).max_body_size == 4096
    config.write_text('max_body_size = "1MiB"\n')
    assert load_settings({}, config).max_body_size == 2**20


@pytest.mark.parametrize(("text", "n_bytes"), [("1500MiB", 1500 * 2**20), ("auto", 0), ("Auto", 0)])
def test_memory_budget_is_a_size_or_auto(text: str, n_bytes: int, config: Path) -> None:
    assert load_settings({"memory_budget": text}).memory_budget == n_bytes
    config.write_text(f'memory_budget = "{text}"\n')
    assert load_settings({}, config).memory_budget == n_bytes


@pytest.mark.parametrize("text", ["-1", "-2"])
def test_size_of_the_prompt_cache_is_auto_by_name_only(text: str, config: Path) -> None:
    config.write_text(f"prompt_cache_size = {text}\n")
    assert error_of({}, config).startswith("`prompt_cache_size` in ")
    config.write_text('prompt_cache_size = "auto"\n')
    assert load_settings({}, config).prompt_cache_size == load_settings({}).prompt_cache_size == -1


def error_of(cli: dict[str, object], config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(cli, config)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("port", "http", "--port"),
        ("port", "70000", "--port"),
        ("queue_size", "-1", "--queue-size"),
        ("max_body_size", "8 apples", "--max-body-size"),
        ("log_level", "loud", "--log-level"),
        ("shutdown_timeout", "nan", "--shutdown-timeout"),
        ("cors_origin", ["localhost:3000"], "--cors-origin"),
        ("api_key", "two words", "--api-key"),
        ("alias", "", "--alias"),
        ("memory_budget", "much", "--memory-budget"),
        ("memory_budget", "0", "--memory-budget"),
        ("vram_budget", "much", "--vram-budget"),
        ("vram_budget", "0", "--vram-budget"),
        ("memory_budget", "999999999999999999999", "--memory-budget"),
        ("prompt_cache_size", "much", "--prompt-cache-size"),
        ("prompt_cache_size", "-1", "--prompt-cache-size"),
        ("max_body_size", "2000TiB", "--max-body-size"),
        ("io", "mmap", "--io"),
        ("reader", "uring", "--reader"),
        ("speculation", "eagle", "--speculation"),
        ("preset", "custom", "--preset"),
        ("exact", "perhaps", "--exact"),
        ("draft_experts", "-1", "--draft-experts"),
        ("max_nodes", "0", "--max-nodes"),
        ("max_nodes", "8", "--max-nodes"),
        ("reuse_strength", "11", "--reuse-strength"),
        ("reuse_strength", "nan", "--reuse-strength"),
        ("reuse_cap", "-1", "--reuse-cap"),
        ("error_budget", "1.1", "--error-budget"),
        ("adaptive", "sometimes", "--adaptive"),
    ],
)
def test_bad_value_names_its_source(
    field: str, value: object, flag: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_of({field: value}).startswith(f"{flag}: ")
    text = value if isinstance(value, str) else value[0]  # type: ignore[index]
    if text:
        monkeypatch.setenv(f"S2MOE_{field.upper()}", text)
        assert error_of({}).startswith(f"S2MOE_{field.upper()}: ")
        monkeypatch.delenv(f"S2MOE_{field.upper()}")
    config.write_text(f'{field} = "{text}"\n')
    assert error_of({}, config).startswith(f"`{field}` in {config}: ")


def test_error_does_not_show_the_key() -> None:
    assert "two words" not in error_of({"api_key": "two words"})


def test_unknown_toml_key_is_refused_with_a_suggestion(config: Path) -> None:
    config.write_text("ctx-size = 5\n")
    text = error_of({}, config)
    assert "`ctx-size`" in text
    assert "`ctx_size`" in text
    config.write_text("qwertz = 5\n")
    assert "--help" in error_of({}, config)


def test_broken_and_missing_config_files_are_named(config: Path) -> None:
    assert str(config) in error_of({}, config)
    config.write_text("port = = 1\n")
    assert "not valid TOML" in error_of({}, config)
    config.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in error_of({}, config)


def test_alias_defaults_to_the_file_or_demo() -> None:
    assert load_settings({}).model_alias == "demo"
    assert load_settings({"model": "/x/olmoe-q4.gguf"}).model_alias == "olmoe-q4"
    assert load_settings({"model": "/x/olmoe-q4.gguf", "alias": "a"}).model_alias == "a"


def test_origins_come_as_list_or_commas(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("http://a", "https://b:3")
    assert load_settings({"cors_origin": list(both)}).cors_origin == both
    config.write_text('cors_origin = ["http://a", "https://b:3"]\n')
    assert load_settings({}, config).cors_origin == both
    monkeypatch.setenv("S2MOE_CORS_ORIGIN", "http://a, https://b:3")
    assert load_settings({}).cors_origin == both
    assert load_settings({"cors_origin": ["*"]}).cors_origin == ("*",)


def test_key_comes_from_setting_or_file_but_not_both(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert load_settings({}).read_api_key() is None
    assert load_settings({"api_key": "k"}).read_api_key() == b"k"
    file.write_text("from-file\nignored\n")
    assert load_settings({"api_key_file": str(file)}).read_api_key() == b"from-file"
    with pytest.raises(SettingsError, match="both"):
        load_settings({"api_key": "k", "api_key_file": str(file)}).read_api_key()
    file.write_text("\n")
    with pytest.raises(SettingsError, match="--api-key-file"):
        load_settings({"api_key_file": str(file)}).read_api_key()
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings({"api_key_file": str(tmp_path / "none")}).read_api_key()


def test_unknown_device_is_refused() -> None:
    assert load_settings({"device": "cuda"}).device == "cuda"
    with pytest.raises(SettingsError, match=r"^--device: .*'cpu' or 'cuda'"):
        load_settings({"device": "tpu"})


def test_key_does_not_show_in_the_repr() -> None:
    assert "hunter2" not in repr(load_settings({"api_key": "hunter2"}))


def test_every_setting_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_readme_lists_every_setting() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name, field in Settings.model_fields.items():
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{flag_of(name)}` "))
        assert f"| `{env_of(name)}` |" in row
        assert row.endswith(f"| {field.description} |")


def test_variables_that_the_project_reads_are_known() -> None:
    reads = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\(|^VARIABLE = )\s*"(S2MOE_\w+)\"""", re.MULTILINE)
    root = Path(__file__).parents[2]
    read = {
        name
        for folder in ("server", "engine", "bench", "deploy", "native", "tests")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".cpp")
        for name in reads.findall(path.read_text(errors="replace"))
    }
    assert read >= {"S2MOE_CACHE_DIR", "S2MOE_LIB_DIR", "S2MOE_TEST_MODEL", "S2MOE_FAULTS"}
    assert unknown_variables(dict.fromkeys(read, "x")) == []


def test_unknown_variables_come_with_what_is_like_them() -> None:
    assert unknown_variables({"S2MOE_MODL": "m", "S2MOE_MODEL": "m", "HOME": "/", "S2MOE_EMPTY": ""}) == [
        "S2MOE_MODL is set, but there is no such setting; did you mean `S2MOE_MODEL`?"
    ]
    (line,) = unknown_variables({"S2MOE_XYZZY": "1"})
    assert line.endswith("; `s2moe serve --help` lists the settings")
