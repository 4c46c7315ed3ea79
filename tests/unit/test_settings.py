from pathlib import Path

import pytest

from common.settings import Settings, SettingsError, load_settings, parse_size, to_environ


def load(*argv: str, **environ: str) -> Settings:
    return load_settings("paceline serve", argv, environ)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "paceline.toml"
    config.write_text('port = 1\nk = 2\ndrafter = "none"\n')
    settings = load("--config", str(config), "--port", "3", PACELINE_PORT="2", PACELINE_K="7")
    assert (settings.port, settings.k, settings.drafter) == (3, 7, "none")


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "paceline.toml"
    config.write_text("port = 1\n")
    assert load(PACELINE_CONFIG=str(config)).port == 1


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "paceline.toml"
    config.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match="'prot'"):
        load("--config", str(config))
    with pytest.raises(SettingsError, match="PACELINE_PROT"):
        load(PACELINE_PROT="1")
    with pytest.raises(SystemExit):
        load("--prot", "1")


def test_k_is_auto_or_a_number() -> None:
    assert load().k == "auto"
    assert load("--k", "auto", PACELINE_K="3").k == "auto"
    assert load(**to_environ(load())).k == "auto"


def test_groups_is_auto_or_one_or_two() -> None:
    assert load().groups == "auto"
    assert load("--groups", "2").groups == 2
    with pytest.raises(SettingsError, match="groups"):
        load("--groups", "3")


def test_an_abbreviated_flag_is_unknown() -> None:
    with pytest.raises(SystemExit):
        load("--por", "1")


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--port", "65536", "port=65536"),
        ("--port", "x", "port"),
        ("--k", "33", "k=33"),
        ("--k", "many", "'many'"),
        ("--page-size", "12", "page_size=12"),
        ("--page-size", "128", "page_size=128"),
        ("--kv-memory", "much", "kv_memory='much'"),
        ("--kv-memory", "1K", "kv_memory=1K"),
        ("--max-num-seqs", "0", "max_num_seqs=0"),
        ("--draft-wait-s", "nan", "draft_wait_s=nan"),
        ("--log-level", "loud", "log_level='loud'"),
        ("--check-page-table", "maybe", "check_page_table"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(flag: str, value: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        load(flag, value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("4G", 4 << 30), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2kb", 2048)],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size("kv_memory", text) == size


def test_the_kv_memory_is_left_to_the_target_unless_it_is_given() -> None:
    assert load().kv_memory_bytes is None
    assert load(**to_environ(load())).kv_memory_bytes is None
    assert load("--kv-memory", "2MiB").kv_memory_bytes == 2 << 20


def test_settings_survive_the_way_through_a_childs_environment() -> None:
    settings = load("--port", "3", "--api-key", "x", "--check-page-table", "true", "--draft-wait-s", "0.5")
    assert load(**to_environ(settings)) == settings


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    config = tmp_path / "paceline.toml"
    config.write_bytes(b"port = \xff")
    with pytest.raises(SettingsError, match=r"paceline\.toml"):
        load("--config", str(config))
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        load("--config", str(tmp_path / "missing.toml"))
