"""sample.py: prompts, stops, streams, and what it says of broken or missing runs."""

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.checkpoint import load_checkpoint, model_from_checkpoint, save_checkpoint, tokenizer_from_checkpoint
from sample import main
from tests.conftest import REPOSITORY, TINY, assert_clean_error, run_prepare, run_sample, run_train, script


def text_of(run: Path, *arguments: str) -> str:
    outcome = run_sample(f"--out_dir={run}", *arguments)
    assert outcome.status == 0, outcome.stderr
    return outcome.stdout


def edited(run: Path, target: Path, name: str, value: float) -> Path:
    """A copy of a checkpoint with one weight set."""
    content = load_checkpoint(run / "last.pt", lazily=False)
    content["model"][name].flatten()[0] = value
    save_checkpoint(target, content)
    return target


def always(run: Path, target: Path, token: int) -> Path:
    """A copy of a checkpoint of an untied model that says one token, whatever it reads."""
    content = load_checkpoint(run / "last.pt", lazily=False)
    content["model"]["blocks.0.feed_forward_add_norm.norm.weight"].zero_()
    content["model"]["blocks.0.feed_forward_add_norm.norm.bias"].fill_(1.0)
    content["model"]["head.weight"].zero_()
    content["model"]["head.weight"][token] = 1.0
    save_checkpoint(target, content)
    return target


@pytest.fixture(scope="module")
def untied_run(char_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "untied"
    assert (
        run_train(f"--data_dir={char_data}", f"--out_dir={folder}", "--max_iters=1", "--tied_head=false", *TINY).status
        == 0
    )
    return folder


def test_S03_a_long_prompt_is_cropped_said_so_and_printed_whole(char_run: Path) -> None:
    prompt = "the quick brown fox " * 5
    outcome = run_sample(f"--out_dir={char_run}", f"--prompt={prompt}", "--max_new_tokens=50")
    assert outcome.status == 0
    assert "100 tokens" in outcome.stderr and "the last 32" in outcome.stderr
    assert outcome.stdout.startswith(prompt) and len(outcome.stdout) == 100 + 50 + 1
    assert "the last" not in run_sample(f"--out_dir={char_run}", "--prompt=the quick", "--max_new_tokens=1").stderr


def test_S04_an_empty_prompt_starts_as_a_document_starts(char_run: Path, here: Path) -> None:
    assert len(text_of(char_run, "--max_new_tokens=40")) == 41
    assert text_of(char_run, "--max_new_tokens=40") == text_of(char_run, "--prompt=", "--max_new_tokens=40")
    assert text_of(char_run, "--prompt=\n", "--max_new_tokens=40") == "\n" + text_of(char_run, "--max_new_tokens=40")


def test_S04_after_several_documents_an_empty_prompt_is_end_of_text(here: Path) -> None:
    (here / "docs").mkdir()
    for i in range(30):
        (here / "docs" / f"{i}.txt").write_text(f"start {i} of a document without line breaks")
    assert (
        run_train(
            "--text=docs", "--tokenizer=char", "--out_dir=run", "--max_iters=400", "--learning_rate=0.01", *TINY
        ).status
        == 0
    )
    assert text_of(here / "run", "--temperature=0", "--max_new_tokens=6").startswith("start ")


def test_S05_the_same_seed_gives_the_same_text_whatever_the_number_of_samples(char_run: Path) -> None:
    def samples(count: int, *arguments: str) -> list[str]:
        text = text_of(char_run, "--prompt=the", f"--num_samples={count}", "--max_new_tokens=30", *arguments)
        return [part.split("\n", 1)[1] for part in text.split("--- sample ")[1:]]

    five, three = samples(5), samples(3)
    assert five[:3] == three and len(set(five)) == 5
    assert samples(3, "--seed=2") != three == samples(3)
    assert five[0] == text_of(char_run, "--prompt=the", "--max_new_tokens=30")


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_S06_the_text_is_the_same_with_and_without_cache_and_on_both_paths(temperature: str, char_run: Path) -> None:
    arguments = ("--prompt=Line", f"--temperature={temperature}", "--max_new_tokens=100")
    expected = text_of(char_run, *arguments)
    assert text_of(char_run, *arguments, "--kv_cache=false") == expected
    assert text_of(char_run, *arguments, "--attention_impl=sdpa") == expected
    assert text_of(char_run, *arguments, "--attention_impl=manual") == expected


def test_S08_a_sample_ends_right_before_the_stop_string(char_run: Path) -> None:
    free = text_of(char_run, "--prompt=Line", "--max_new_tokens=200", "--temperature=0.5")
    marker = free[60:63]
    stopped = text_of(char_run, "--prompt=Line", "--max_new_tokens=200", "--temperature=0.5", f"--stop={marker}")
    assert stopped == free[: free.index(marker, 4)] + "\n"


def test_S08_end_of_text_ends_a_sample_and_is_shown_only_when_asked(untied_run: Path, tmp_path: Path) -> None:
    vocab_size = load_checkpoint(untied_run / "last.pt")["model_config"]["vocab_size"]
    path = always(untied_run, tmp_path / "ends.pt", vocab_size - 1)
    for arguments, expected in (([], "Line\n"), (["--show_special"], "Line<|endoftext|>\n")):
        outcome = run_sample(f"--checkpoint={path}", "--prompt=Line", *arguments)
        assert (outcome.status, outcome.stdout) == (0, expected), outcome.stderr


def test_D06_the_marker_in_a_prompt_follows_the_rule_of_the_data(here: Path) -> None:
    (here / "text.txt").write_text("one <|endoftext|> two\n" * 60)
    for name, option in (("plain", "--parse_special=false"), ("parsed", "--parse_special=true")):
        outcome = run_train("--text=text.txt", "--tokenizer=byte", f"--out_dir={name}", "--max_iters=1", option, *TINY)
        assert outcome.status == 0, outcome.stderr
    prompt = "--prompt=one <|endoftext|>"
    plain = run_sample("--out_dir=plain", prompt, "--max_new_tokens=0")
    assert plain.stdout == "one <|endoftext|>\n"
    long = "--prompt=" + "<|endoftext|>" * 20  # 260 bytes, or 20 ids
    assert "260 tokens" in run_sample("--out_dir=plain", long, "--max_new_tokens=0").stderr
    assert "tokens;" not in run_sample("--out_dir=parsed", long, "--parse_special", "--max_new_tokens=0").stderr


def test_D15_a_prompt_follows_the_newline_rule_of_the_data(char_run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("\ufeffLine 1:\r\nLine".encode())
    expected = text_of(char_run, "--prompt=Line 1:\nLine", "--max_new_tokens=10")
    assert text_of(char_run, f"--prompt_file={tmp_path / 'prompt.txt'}", "--max_new_tokens=10") == expected
    assert text_of(char_run, "--prompt=Line 1:\r\nLine", "--max_new_tokens=10") == expected


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_prompt_file_that_cannot_be_read_is_a_clean_error(
    content: bytes | None, char_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    if content:
        path.write_bytes(content)
    assert_clean_error(run_sample(f"--out_dir={char_run}", f"--prompt_file={path}"), "prompt.txt")


def test_a_prompt_with_unknown_characters_is_a_clean_error(char_run: Path) -> None:
    assert_clean_error(run_sample(f"--out_dir={char_run}", "--prompt=한글"), "'글' '한'", "--tokenizer=byte")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_V06_a_broken_weight_is_a_clean_error_with_the_step(value: float, char_run: Path, tmp_path: Path) -> None:
    path = edited(char_run, tmp_path / "broken.pt", "blocks.0.attention.query.weight", value)
    outcome = run_sample(f"--checkpoint={path}", "--prompt=Line")
    assert_clean_error(outcome, "not finite at new token 1")


def test_T04_sampling_needs_no_gpu_and_says_what_it_runs_on(char_run: Path, tmp_path: Path) -> None:
    outcome = script(
        "sample.py", f"--out_dir={char_run}", "--max_new_tokens=5", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert outcome.status == 0 and "on cpu in torch.float32 (auto: " in outcome.stderr


@pytest.mark.parametrize("where", [["--out_dir=nowhere"], ["--checkpoint=nowhere/last.pt"], []])
def test_K08_a_missing_run_is_a_clean_error(where: list[str], here: Path) -> None:
    assert_clean_error(run_sample(*where), "nowhere" if where else "runs", "no ")


def test_K08_a_damaged_checkpoint_is_a_clean_error(char_run: Path, tmp_path: Path) -> None:
    (tmp_path / "half.pt").write_bytes((char_run / "last.pt").read_bytes()[:3000])
    assert_clean_error(run_sample(f"--checkpoint={tmp_path / 'half.pt'}"), "half.pt", "damaged")


def test_without_a_name_the_newest_run_is_sampled_and_the_best_checkpoint_taken(here: Path, char_data: Path) -> None:
    for name in ("first", "second"):
        assert run_train(f"--data_dir={char_data}", f"--out_dir=runs/{name}", "--max_iters=1", *TINY).status == 0
        time.sleep(0.02)
    assert "runs/second/best.pt" in run_sample("--max_new_tokens=1").stderr
    (here / "runs/second/best.pt").unlink()
    assert "runs/second/last.pt" in run_sample("--max_new_tokens=1").stderr


def test_S10_text_is_flushed_as_it_is_made_and_is_the_text_of_the_library(char_run: Path, tmp_path: Path) -> None:
    arguments = [f"--out_dir={char_run}", "--prompt=Line", "--max_new_tokens=100000", "--device=cpu"]
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "sample.py"), *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    early = process.stdout.read(40).decode()  # arrives although the sample is far from done
    assert process.poll() is None
    process.stdout.close()  # as `| head` does
    assert process.wait(timeout=60) in (141, -13)
    assert text_of(char_run, "--prompt=Line", "--max_new_tokens=60").startswith(early)


def test_S10_not_a_character_waits_for_the_next(char_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that fills up is flushed by itself, so what waits is counted here."""

    class Console(io.StringIO):
        waiting = longest_wait = 0

        def write(self, text: str) -> int:
            self.waiting += len(text)
            self.longest_wait = max(self.longest_wait, self.waiting)
            return super().write(text)

        def flush(self) -> None:
            self.waiting = 0

    console = Console()
    monkeypatch.setattr(sys, "stdout", console)
    main([f"--out_dir={char_run}", "--prompt=Line", "--max_new_tokens=60", "--device=cpu"])
    assert len(console.getvalue()) == len("Line") + 60 + len("\n")
    assert console.longest_wait == len("Line") and console.waiting == 0


def test_D02_an_accented_prompt_works_under_an_ascii_locale(here: Path) -> None:
    (here / "text.txt").write_text("Où est l'été? Ça va très bien.\n" * 30, encoding="utf-8")
    ascii_locale = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    assert run_prepare("text.txt", "--tokenizer=char", "--out_dir=data").status == 0
    assert run_train("--data_dir=data", "--out_dir=run", "--max_iters=1", *TINY).status == 0
    outcomes = [
        script("sample.py", "--out_dir=run", "--prompt=l'été", "--max_new_tokens=20", cwd=here, env=env)
        for env in (ascii_locale, {"PYTHONUTF8": "1"})
    ]
    assert outcomes[0].status == 0, outcomes[0].stderr
    assert outcomes[0].stdout == outcomes[1].stdout and outcomes[0].stdout.startswith("l'été")


def test_D02_a_console_that_lacks_a_character_gets_a_question_mark(here: Path) -> None:
    (here / "text.txt").write_text("한국어 텍스트 " * 60, encoding="utf-8")
    assert run_train("--text=text.txt", "--tokenizer=char", "--out_dir=run", "--max_iters=1", *TINY).status == 0
    outcome = script(
        "sample.py",
        "--out_dir=run",
        "--prompt=한국어",
        "--max_new_tokens=0",
        cwd=here,
        env={"PYTHONIOENCODING": "latin-1"},
    )
    assert (outcome.status, outcome.stdout) == (0, "???\n"), outcome.stderr


def test_sampling_in_half_precision_works(char_run: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        assert len(text_of(char_run, f"--dtype={dtype}", "--prompt=Line", "--max_new_tokens=40")) == 45
    assert torch.get_default_dtype() == torch.float32


# --- many prompts ---------------------------------------------------------------------------------------------------


def parted(stdout: str) -> dict[str, str]:
    """The completions by the line above each."""
    parts = re.split(r"^--- (.*)\n", stdout, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


PROMPTS = ["Line", "Line 3: the quick brown", "j", "the lazy dogs.", "Line 70"]


@pytest.mark.parametrize("batch_size", ["1", "3", "16"])
def test_S11_prompts_from_a_file_give_the_same_texts_as_one_by_one(batch_size: str, char_run: Path, here: Path) -> None:
    (here / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    options = (f"--out_dir={char_run}", "--max_new_tokens=50", "--num_samples=2", "--stop=fox")
    outcome = run_sample(*options, "--prompts_file=prompts.txt", f"--batch_size={batch_size}")
    assert outcome.status == 0, outcome.stderr
    texts = parted(outcome.stdout)
    assert len(texts) == 10
    for number, prompt in enumerate(PROMPTS, start=1):
        alone = parted(run_sample(*options, f"--prompt={prompt}").stdout)
        for sample in ("1", "2"):
            assert texts[f"prompt {number} of 5, sample {sample} of 2"] == alone[f"sample {sample} of 2"]
    assert not any("fox" in text for text in texts.values())


def test_prompts_from_jsonl_may_hold_line_breaks(char_run: Path, here: Path) -> None:
    (here / "p.jsonl").write_text('{"prompt": "Line 1\\nLine"}\n\n{"prompt": ""}\n', encoding="utf-8")
    outcome = run_sample(f"--out_dir={char_run}", "--prompts_file=p.jsonl", "--max_new_tokens=3")
    assert outcome.status == 0, outcome.stderr
    assert parted(outcome.stdout)["prompt 1 of 2"].startswith("Line 1\nLine")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\n\n", "holds no prompts"),
        ('{"text": "a"}', "JSON object with a prompt"),
        ('{"prompt": 3}', "line 1: its prompt is no text"),
        ("[" * 100_000, "JSON object with a prompt"),
    ],
)
def test_a_file_without_prompts_is_a_clean_error(content: str, words: str, char_run: Path, here: Path) -> None:
    (here / "p.jsonl").write_text(content, encoding="utf-8")
    outcome = run_sample(f"--out_dir={char_run}", "--prompts_file=p.jsonl")
    assert_clean_error(outcome, "p.jsonl", words)
    assert outcome.stdout == ""


def test_the_prompt_is_echoed_or_not(char_run: Path) -> None:
    options = (f"--out_dir={char_run}", "--prompt=Line", "--max_new_tokens=20")
    assert run_sample(*options).stdout == "Line" + run_sample(*options, "--echo=false").stdout


def test_an_interactive_session_keeps_the_model_and_outlives_a_prompt_that_cannot_be(
    tmp_path: Path, char_run: Path
) -> None:
    options = (f"--out_dir={char_run}", "--max_new_tokens=12", "--device=cpu")
    outcome = script("sample.py", *options, "--interactive", cwd=tmp_path, stdin="Line\n한글\nthe\n".encode())
    assert outcome.status == 0, outcome.stderr
    alone = [run_sample(*options[:2], f"--prompt={prompt}").stdout for prompt in ("Line", "the")]
    assert outcome.stdout == "".join(alone)
    assert outcome.stderr.count("prompt (an empty line ends)") == 4 and "the char vocabulary has no" in outcome.stderr
    assert outcome.stderr.count("parameters, on cpu") == 1, "the model is loaded once"


def test_bytes_that_are_no_text_do_not_end_a_session(tmp_path: Path, char_run: Path) -> None:
    options = (f"--out_dir={char_run}", "--max_new_tokens=5", "--device=cpu", "--interactive")
    outcome = script("sample.py", *options, cwd=tmp_path, stdin=b"a\xff\xfe\nLine\n" + b"Line 1" * 9 + b"\n")
    assert outcome.status == 0 and "Traceback" not in outcome.stderr, outcome.stderr
    assert "invalid start byte" in outcome.stderr and outcome.stdout.startswith("Line")
    assert "the model sees the last 32 of them" in outcome.stderr
    command = f"exec {sys.executable} {REPOSITORY / 'sample.py'} {' '.join(options)} <&-"
    closed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert closed.returncode == 2 and "standard input: is closed" in closed.stderr


def test_half_a_surrogate_pair_in_a_prompt_is_a_clean_error(char_run: Path, here: Path) -> None:
    (here / "p.jsonl").write_text('{"prompt": "\\ud800x"}\n', encoding="utf-8")
    assert_clean_error(run_sample(f"--out_dir={char_run}", "--prompts_file=p.jsonl"), "half a surrogate pair")


def test_C03_a_flag_that_is_given_as_false_stands_instead_of_nothing(char_run: Path) -> None:
    outcome = run_sample(f"--out_dir={char_run}", "--interactive=false", "--prompt=Line", "--max_new_tokens=1")
    assert outcome.status == 0 and outcome.stdout.startswith("Line"), outcome.stderr


def test_S08_a_batch_ends_each_text_before_its_own_stop(char_run: Path, here: Path) -> None:
    (here / "prompts.txt").write_text("Line 1: the qu\nLine 1: the quick brown fox jumps over 3 la\n", encoding="utf-8")
    options = ("--prompts_file=prompts.txt", "--batch_size=2", "--temperature=0", "--max_new_tokens=40", "--echo=false")
    texts = parted(run_sample(f"--out_dir={char_run}", *options, "--stop", "brown", "zy").stdout)
    assert texts["prompt 1 of 2"].strip().startswith("ick") and "brown" not in texts["prompt 1 of 2"]
    assert texts["prompt 2 of 2"] == "\n"


def test_log_probabilities_are_those_of_the_model_one_line_a_token(char_run: Path) -> None:
    options = (f"--out_dir={char_run}", "--prompt=Line", "--max_new_tokens=8", "--temperature=1.5", "--num_samples=2")
    outcome = run_sample(*options, "--logprobs=3", "--batch_size=2")
    assert outcome.status == 0, outcome.stderr
    lines = [json.loads(line) for line in outcome.stdout.splitlines()]
    content = load_checkpoint(char_run / "best.pt")
    model = model_from_checkpoint(content, char_run).eval()
    tokenizer = tokenizer_from_checkpoint(content, char_run)
    texts = parted(run_sample(*options).stdout)
    for sample in (0, 1):
        own = [line for line in lines if line["sample"] == sample]
        assert [line["index"] for line in own] == list(range(8)) and all(line["prompt"] == 0 for line in own)
        assert "Line" + "".join(line["text"] for line in own) + "\n" == texts[f"sample {sample + 1} of 2"]
        ids = torch.tensor([[*tokenizer.encode("Line").tolist(), *(line["id"] for line in own)]])
        expected = model(ids)[0][0].log_softmax(dim=-1)
        for place, line in enumerate(own):
            row = expected[3 + place]
            assert line["logprob"] == pytest.approx(row[line["id"]].item(), abs=1e-4)
            assert [top["id"] for top in line["top"]] == row.topk(3).indices.tolist()
            assert [top["logprob"] for top in line["top"]] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            assert bytes(line["bytes"]).decode() == line["text"]


def test_log_probabilities_of_a_batch_end_with_each_text(char_run: Path, here: Path) -> None:
    prompts = ("Line 1: the qu", "Line 1: the quick brown fox jumps over 3 la", "Line")
    (here / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    options = (
        "--prompts_file=prompts.txt",
        "--batch_size=3",
        "--temperature=0",
        "--max_new_tokens=40",
        "--stop",
        "zy",
        "ck",
    )
    lines = [
        json.loads(line) for line in run_sample(f"--out_dir={char_run}", *options, "--logprobs=1").stdout.splitlines()
    ]
    made = ["".join(line["text"] for line in lines if line["prompt"] == number) for number in range(3)]
    assert made[1] == "zy" and made[0].endswith(("zy", "ck")) and all(text.count("zy") <= 1 for text in made)
    assert len({len(text) for text in made}) == 3, "they end at different times"


def test_log_probabilities_end_with_the_text(char_run: Path) -> None:
    options = (f"--out_dir={char_run}", "--prompt=Line 1: the qu", "--temperature=0", "--logprobs=1", "--stop=lazy")
    lines = run_sample(*options, "--max_new_tokens=60").stdout.splitlines()
    assert "".join(json.loads(line)["text"] for line in lines).endswith("lazy")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt=a", "--prompts_file=b"], "prompts_file and prompt are both given"),
        (["--interactive", "--prompt=a"], "interactive and prompt are both given"),
        (["--interactive", "--attention_page=a.html"], "attention_page shows one text, but interactive = True"),
        (["--prompts_file=b", "--attention_page=a.html"], "attention_page shows one text, but prompts_file = b"),
        (["--min_p=2"], "min_p = '2'"),
        (["--repetition_penalty=0"], "repetition_penalty = '0'"),
        (["--prompts_file=missing.txt"], "missing.txt: cannot be read"),
    ],
)
def test_options_of_sampling_that_contradict_each_other_are_refused(
    arguments: list[str], words: str, char_run: Path, here: Path
) -> None:
    assert_clean_error(run_sample(f"--out_dir={char_run}", *arguments), words)
