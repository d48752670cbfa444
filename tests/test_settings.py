"""The command line and presets: what is accepted, what is refused, and in which words."""

import tomllib
from pathlib import Path

import pytest

from config.command_line import parse, to_toml
from config.errors import UserError
from config.fields import Settings
from config.preparation import PrepareSettings
from config.schema import SampleSettings, TrainSettings
from tests.conftest import REPOSITORY, assert_clean_error, run_train, script


def train_settings(*argv: str) -> TrainSettings:
    return parse(TrainSettings, list(argv), takes_preset=True)


def refusal(*argv: str, schema: type[Settings] = TrainSettings) -> str:
    with pytest.raises(UserError) as caught:
        parse(schema, list(argv), takes_preset=schema is TrainSettings)
    message = str(caught.value)
    assert message.count("\n") <= 1
    return message


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--learning_rate=1e-3", "learning_rate", 1e-3),
        ("--weight_decay=0", "weight_decay", 0.0),
        ("--max_iters=1e3", "max_iters", 1000),
        ("--max_iters=1000.0", "max_iters", 1000),
        ("--max_iters= 7 ", "max_iters", 7),
        ("--seed=9007199254740993", "seed", 9007199254740993),  # not a float64
    ],
)
def test_C02_reasonable_spellings_of_numbers_have_the_keys_type(argument: str, name: str, value: float) -> None:
    accepted = getattr(train_settings(argument), name)
    assert accepted == value and type(accepted) is type(value)


@pytest.mark.parametrize(
    "argument", ["--max_iters=2.5", "--max_iters=many", "--max_iters=", "--max_iters=1e400", "--max_iters=nan"]
)
def test_C02_a_fraction_is_no_whole_number(argument: str) -> None:
    message = refusal(argument)
    assert "max_iters" in message and argument.split("=")[1] in message and "a whole number" in message


@pytest.mark.parametrize("value", ["nan", "inf", "fast", ""])
def test_C02_a_rate_must_be_a_finite_number(value: str) -> None:
    assert "learning_rate" in refusal(f"--learning_rate={value}") and "a number" in refusal(f"--learning_rate={value}")


def test_C02_whole_numbers_in_a_preset_may_be_written_as_floats_but_not_as_booleans(tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text("max_iters = 1e3\nlearning_rate = 1\n")
    assert train_settings(str(preset)).max_iters == 1000
    preset.write_text("max_iters = true\n")
    assert "max_iters = True: expected a whole number" in refusal(str(preset))


@pytest.mark.parametrize("spelling", ["false", "False", "FALSE", "0", "no", "off"])
def test_C03_every_spelling_of_false_is_off(spelling: str) -> None:
    assert train_settings(f"--compile={spelling}").compile is False
    assert train_settings(f"--bias={spelling}").bias is False


@pytest.mark.parametrize(
    "arguments", [["--compile=true"], ["--compile=True"], ["--compile=1"], ["--compile"], ["--compile", "true"]]
)
def test_C03_the_bare_form_and_every_spelling_of_true_are_on(arguments: list[str]) -> None:
    assert train_settings(*arguments).compile is True


def test_C03_another_word_is_refused_with_the_choices() -> None:
    assert "compile = 'maybe': expected true or false" in refusal("--compile=maybe")


def test_C03_the_effective_value_is_printed(here: Path, char_data: Path) -> None:
    arguments = (
        f"--data_dir={char_data}",
        "--n_layer=1",
        "--n_head=1",
        "--n_embd=8",
        "--block_size=8",
        "--max_iters=0",
    )
    assert "compile False" in run_train(*arguments, "--compile=0").stdout


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("lerning_rate", "learning_rate"),
        ("learning-rate", "learning_rate"),
        ("attn_impl", "attention_impl"),
        ("n_layers", "n_layer"),
    ],
)
def test_C04_a_misspelt_key_is_refused_with_the_nearest_one_everywhere(typo: str, nearest: str, tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text(f"{typo} = 1e-4\n")
    for arguments in ([f"--{typo}=1e-4"], [f"--{typo}", "1e-4"], [str(preset)]):
        message = refusal(*arguments)
        assert typo in message and f"did you mean {nearest}?" in message


def test_C04_the_space_form_works() -> None:
    assert train_settings("--learning_rate", "1e-3", "--max_iters", "5").learning_rate == 1e-3
    assert "max_iters = -5" in refusal("--max_iters", "-5").replace("'", "")


def test_C04_a_key_without_a_value_and_a_stray_word_are_refused() -> None:
    assert "--seed" in refusal("--seed")
    assert "stray" in refusal("config/original.toml", "stray")
    assert "no such file" in refusal("missing.toml")


@pytest.mark.parametrize(
    "text", ["import os\n", "max_iters = int('5')\n", "max_iters = 5 +\n", "[model]\nn_layer = 2\n"]
)
def test_C05_a_preset_is_data_and_never_run(text: str, tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text(text)
    assert str(preset) in refusal(str(preset))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", None])
def test_C05_a_preset_of_another_kind_is_refused_or_empty(content: bytes | None, tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    if content is None:
        preset.mkdir()
    else:
        preset.write_bytes(content)
    if content == b"":
        assert train_settings(str(preset)) == TrainSettings()
    else:
        assert str(preset) in refusal(str(preset))


def test_C06_a_width_that_the_heads_do_not_divide_is_refused_before_anything_else(here: Path) -> None:
    outcome = run_train("--n_embd=30", "--n_head=4", "--text=missing.txt")
    assert_clean_error(outcome, "n_embd = 30", "n_head = 4")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ("--max_iters=-5", "0 or more"),
        ("--batch_size=0", "1 or more"),
        ("--dropout=1.5", "0 or more and less than 1"),
        ("--dropout=-0.1", "0 or more and less than 1"),
        ("--eval_interval=0", "1 or more"),
        ("--attention_impl=flash", "manual or sdpa"),
        ("--norm_placement=none", "post or pre"),
        ("--dtype=fp16", "auto or float32 or bfloat16 or float16"),
        ("--device=gpu", "auto, cpu, cuda, cuda:N or mps"),
        ("--wandb=yes", "disabled or offline or online"),
        ("--seed=-1", "0 or more"),
        ("--val_fraction=1", "less than 1"),
        ("--vocab_size=256", "257 or more"),
        ("--beta2=1", "less than 1"),
    ],
)
def test_C07_a_value_out_of_range_is_refused_with_the_range(argument: str, allowed: str) -> None:
    name, value = argument.lstrip("-").split("=")
    message = refusal(argument)
    assert message.startswith(name) and value in message and allowed in message


def test_C07_every_whole_number_and_rate_of_every_schema_has_a_lower_bound() -> None:
    for schema in (TrainSettings, SampleSettings, PrepareSettings):
        for name, field in schema.model_fields.items():
            if field.annotation in (int, float):
                assert any(hasattr(rule, "ge") or hasattr(rule, "gt") for rule in field.metadata), name


@pytest.mark.parametrize(
    "argument",
    [
        "--batch_size=1e19",
        "--n_layer=1e6",
        "--n_embd=1e30",
        "--block_size=1e30",
        "--device=cuda:99999999999",
        "--max_iters=1e10",
    ],
)
def test_C07_sizes_beyond_any_machine_are_refused(argument: str) -> None:
    assert argument.lstrip("-").split("=")[0] in refusal(argument)


def test_C07_an_update_beyond_any_memory_is_refused() -> None:
    assert "2**40" in refusal("--batch_size=1e9", "--gradient_accumulation_steps=1e9")


@pytest.mark.parametrize("argument", ["--text=caf\udce9.txt", "--out_dir=r\udce9", "\udcff.toml"])
def test_D02_bytes_that_are_no_utf8_are_refused(argument: str) -> None:
    assert "not UTF-8" in refusal(argument)


@pytest.mark.parametrize("preset", ["quick.yaml", "quick.tom", ""])
def test_C04_a_name_that_only_begins_like_a_preset_is_refused(preset: str) -> None:
    assert "preset" in refusal(preset)


@pytest.mark.parametrize(
    "text",
    ["seed = " + "9" * 5000, "a = " + "[" * 50000, 'out_dir = "a\\u0000b"', "seed = 1979-05-27"],
    ids=str.__len__,
)
def test_C05_odd_presets_are_refused(text: str, tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text(text + "\n")
    assert "expected" in refusal(str(preset)) or str(preset) in refusal(str(preset))


@pytest.mark.parametrize(
    ("schema", "arguments", "words"),
    [
        (TrainSettings, ["--text=a", "--data_dir=b"], "both given"),
        (TrainSettings, ["--data_dir=b", "--tokenizer=char"], "both given"),
        (TrainSettings, ["--min_lr=1", "--learning_rate=0.1"], "min_lr = 1.0 is above"),
        (SampleSettings, ["--prompt=a", "--prompt_file=b"], "both given"),
        (SampleSettings, ["--out_dir=a", "--checkpoint=b"], "both given"),
        (SampleSettings, ["--stop="], "stop is empty"),
        (SampleSettings, ["--temperature=-1"], "0 or more"),
        (SampleSettings, ["--top_p=0"], "more than 0 and at most 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    schema: type[Settings], arguments: list[str], words: str
) -> None:
    assert words in refusal(*arguments, schema=schema)


def test_the_command_line_goes_before_the_preset_and_the_preset_before_the_defaults(tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text("n_layer = 3\nn_head = 2\ntext = 'stdlib'\ntokenizer = 'char'\n")
    chosen = train_settings(str(preset), "--n_layer=5")
    assert (chosen.n_layer, chosen.n_head, chosen.n_embd) == (5, 2, TrainSettings().n_embd)
    prepared = train_settings(str(preset), "--data_dir=d")
    assert (prepared.text, prepared.data_dir) == ("", "d")


def test_environment_variables_are_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEVICE", "COMPILE", "N_LAYER", "n_layer"):
        monkeypatch.setenv(name, "1")
    assert train_settings() == TrainSettings()


def test_resolved_settings_can_be_fed_back_in(tmp_path: Path) -> None:
    chosen = train_settings("--n_layer=2", '--text=a "quoted" \\ name é 한.txt', "--learning_rate=3e-4", "--bias=false")
    saved = tmp_path / "settings.toml"
    saved.write_text(to_toml(chosen), encoding="utf-8")
    assert train_settings(str(saved)) == chosen


def test_stop_may_be_given_several_times_and_keeps_commas_and_line_breaks() -> None:
    chosen = parse(SampleSettings, ["--stop=a, b", "--stop=\n\n"])
    assert chosen.stop == ["a, b", "\n\n"]


@pytest.mark.parametrize("preset", sorted(path.name for path in (REPOSITORY / "config").glob("*.toml")))
def test_presets_are_valid_and_state_only_differences(preset: str) -> None:
    path = REPOSITORY / "config" / preset
    stated = tomllib.loads(path.read_text(encoding="utf-8"))
    assert 5 <= len(stated) <= 20
    chosen = train_settings(str(path))
    assert train_settings(path.stem) == chosen
    assert {name: getattr(chosen, name) for name in stated} == stated


@pytest.mark.parametrize("name", ["train.py", "sample.py", "prepare.py"])
def test_help_shows_every_setting_with_meaning_and_default(name: str, tmp_path: Path) -> None:
    outcome = script(name, "--help", cwd=tmp_path)
    schema = {"train.py": TrainSettings, "sample.py": SampleSettings, "prepare.py": PrepareSettings}[name]
    flat = " ".join(outcome.stdout.split())
    assert outcome.status == 0
    for setting, field in schema.model_fields.items():
        assert setting in flat or setting.upper() in flat
        assert " ".join((field.description or "").split())[:40] in flat, setting
