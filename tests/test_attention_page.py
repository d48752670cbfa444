"""The attention page: right numbers, seen and used in a real browser."""

import base64
import gzip
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from model import GPT, GPTConfig
from tests.browser import Opened, chromium
from tests.conftest import assert_clean_error, run_sample
from views.attention_page import attention_and_surprise, packed_weights, write_attention_page
from views.token_text import NOTHING, token_texts

BYTES = ByteTokenizer()
TEXT = "한글과 emoji 👩‍👩‍👧 e\u0301.\n둘째 줄 <b>\t&amp; </script><script>alert(1)</script>"
CHARS = CharTokenizer(set(TEXT))


def sharp_model(tokenizer: Tokenizer, **sizes: int) -> GPT:
    """A random model with attention that is far from uniform."""
    torch.manual_seed(4)
    shape = {"block_size": 600, "n_layer": 2, "n_head": 3, "n_embd": 48, **sizes}
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        model.token_embedding.weight.mul_(30)
        model.position_embedding.weight.mul_(30)
        for block in model.blocks:
            for layer in (block.attention.query, block.attention.key):
                layer.weight.mul_(15)
    return model


def page_data(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def unpacked(text: str, heads: int, T: int) -> np.ndarray:
    """(H, T, T) weights from what the page holds."""
    fractions = np.frombuffer(gzip.decompress(base64.b64decode(text)), dtype="<u2").reshape(heads, -1)
    weights = np.zeros((heads, T, T))
    weights[:, np.tri(T, dtype=bool)] = fractions / 65535
    return weights


# --- what the page holds --------------------------------------------------------------------------------------------


def test_the_weights_on_the_page_are_the_models(tmp_path: Path) -> None:
    model, ids = sharp_model(CHARS), CHARS.encode(TEXT).tolist()
    assert write_attention_page(tmp_path / "page.html", model, CHARS, ids, "title") == len(ids)
    data = page_data(tmp_path / "page.html")
    _, _, expected = model(torch.tensor([ids]), return_attention_weights=True)
    assert len(data["layers"]) == 2 and data["heads"] == 3
    for packed, weights in zip(data["layers"], expected, strict=True):
        np.testing.assert_allclose(unpacked(packed, 3, len(ids)), weights[0].detach().numpy(), atol=1e-5)
    assert max(weights.max().item() for weights in expected) > 0.5, "not a page of uniform weights"


def test_surprise_is_the_negative_binary_logarithm_of_the_probability() -> None:
    model, ids = sharp_model(CHARS), CHARS.encode(TEXT).tolist()
    _, surprises = attention_and_surprise(model, ids)
    assert surprises[0] is None and len(surprises) == len(ids)
    probabilities = model(torch.tensor([ids]))[0][0].double().softmax(dim=-1)
    for position in (1, 7, len(ids) - 1):
        bits = -math.log2(probabilities[position - 1, ids[position]].item())
        assert surprises[position] == pytest.approx(bits, abs=1e-4)


def test_a_half_precision_model_can_be_shown(tmp_path: Path) -> None:
    model = sharp_model(BYTES).bfloat16()
    assert write_attention_page(tmp_path / "page.html", model, BYTES, [1, 2, 3], "title") == 3


@pytest.mark.parametrize(
    ("block_size", "length", "shown"), [(600, 700, 512), (40, 700, 40), (600, 20, 20), (600, 1, 1)]
)
def test_the_last_tokens_are_shown_as_many_as_model_and_page_hold(
    block_size: int, length: int, shown: int, tmp_path: Path
) -> None:
    model, ids = sharp_model(BYTES, n_layer=1, n_head=1, block_size=block_size), [i % 256 for i in range(length)]
    assert write_attention_page(tmp_path / "page.html", model, BYTES, ids, "title") == shown
    data = page_data(tmp_path / "page.html")
    assert len(data["tokens"]) == len(data["surprises"]) == shown
    expected = model(torch.tensor([ids[-shown:]]), return_attention_weights=True)[2][0][0].detach().numpy()
    np.testing.assert_allclose(unpacked(data["layers"][0], 1, shown), expected, atol=1e-5)
    assert (f"{length - shown} before them are left out" in (tmp_path / "page.html").read_text()) == (length > shown)


def test_a_weight_of_one_and_of_zero_are_kept_exactly() -> None:
    assert unpacked(packed_weights(torch.eye(3)[None]), 1, 3).tolist() == [np.eye(3).tolist()]


# --- tokens as text -------------------------------------------------------------------------------------------------


def shown(text: str, tokenizer: Tokenizer = BYTES) -> list[tuple[str, str, str]]:
    return [tuple(token) for token in token_texts(tokenizer.encode(text).tolist(), tokenizer)]  # type: ignore[misc]


def test_a_character_of_several_tokens_is_shown_in_the_first() -> None:
    assert shown("a한") == [("a", "", "a"), ("한", "", "한"), ("", "2/3", "한 2/3"), ("", "3/3", "한 3/3")]


JOINED = ("👩‍👩‍👧", "e\u0301", "\u1112\u1161\u11ab", "🇰🇷", "👍🏽", "🏴\U000e0067\U000e0062\U000e007f")


@pytest.mark.parametrize("character", JOINED)
def test_a_character_of_several_code_points_stays_whole(character: str) -> None:
    tokens = shown(f"x{character}y", CharTokenizer(set(f"x{character}y")))
    assert [token[0] for token in tokens] == ["x", character, *[""] * (len(character) - 1), "y"]
    assert tokens[2][1] == f"2/{len(character)}"


def test_blanks_controls_and_broken_bytes_are_made_visible() -> None:
    assert [token[2] for token in shown(" \n\t\r\x00\x7f")] == ["␣", "⏎", "⇥", "␍", "␀", "␡"]
    assert [token[0] for token in shown(" \n")] == [" ", "\n"], "in the text itself they do what they do"
    assert [token.text for token in token_texts([0xFF, 0x61, 0xED, 0x95], BYTES)] == ["\ufffd", "a", "\ufffd", "\ufffd"]
    assert shown("\u202e")[0][0] == "‹202E›", "what turns text round does not turn the page round"


def test_end_of_text_and_tokens_without_text_have_a_label() -> None:
    assert token_texts([CHARS.end_of_text], CHARS)[0].label == "<|endoftext|>"

    holed = ByteTokenizer()
    holed.token_bytes = [b"", *holed.token_bytes[1:]]
    assert [token.label for token in token_texts([0x61, 0, 0x62], holed)] == ["a", NOTHING, "b"]


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["C"]), max_size=20), st.binary(max_size=20))
def test_the_tokens_together_show_every_character_once(text: str, noise: bytes) -> None:
    assert "".join(token.text for token in token_texts(list(text.encode()), BYTES)) == text
    tokens = token_texts(list(noise), BYTES)
    assert len(tokens) == len(noise) and all(token.label for token in tokens)
    assert all(token.text or token.part for token in tokens), "whatever the bytes"


# --- in the browser -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT, list[int]]:
    """A page of TEXT, its model and its ids."""
    path, model, ids = tmp_path_factory.mktemp("page") / "page.html", sharp_model(CHARS), CHARS.encode(TEXT).tolist()
    write_attention_page(path, model, CHARS, ids, "A <b>title</b>")
    return path, model, ids


def weights_of(model: GPT, ids: list[int], layer: int, head: int) -> torch.Tensor:
    return model(torch.tensor([ids]), return_attention_weights=True)[2][layer][0, head].detach()


def assert_shows(opened: Opened, model: GPT, ids: list[int], layer: int, head: int, token: int) -> None:
    """The page shows what this token attends to in this head: in the text, and in the list."""
    weights = weights_of(model, ids, layer, head)[token]
    titles = opened.page.eval_on_selector_all(".token", "spans => spans.map(span => span.title)")
    said = [float(title.rsplit(" ", 1)[1]) for title in titles]
    np.testing.assert_allclose(said, weights.numpy(), atol=1e-4)
    percents = opened.page.eval_on_selector_all(".token", "spans => spans.map(span => span.dataset.percent ?? '')")
    for percent, weight in zip(percents, weights.tolist(), strict=True):
        assert percent == (f"{100 * weight:.0f}" if weight >= 0.05 else "") or abs(weight * 100 % 1 - 0.5) < 0.01
    lines = opened.text("#attended").split("\n")
    assert float(lines[1]) == pytest.approx(weights.max().item(), abs=1e-4)
    label = token_texts(ids, CHARS)[int(weights.argmax())].label
    assert lines[0].strip() == label
    assert opened.text("#map-title") == f"Layer {layer + 1}, head {head + 1}"
    chosen = opened.page.eval_on_selector_all(".token", "s => s.findIndex(x => x.ariaSelected === 'true')")
    assert chosen == token and f"Token {token + 1}," in opened.text("#chosen")


def test_hovering_over_a_token_shows_what_it_attends_to(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    path, model, ids = small
    with Opened(browser, path) as opened:
        assert_shows(opened, model, ids, 0, 0, len(ids) - 1)
        opened.page.hover(".token >> nth=9")
        assert_shows(opened, model, ids, 0, 0, 9)
        opened.page.click("#heads button >> nth=4")
        assert_shows(opened, model, ids, 1, 1, 9)
        assert opened.complaints == [] and opened.addresses == [path.as_uri()], "nothing comes over a network"


def test_everything_can_be_done_with_the_keyboard(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    path, model, ids = small
    with Opened(browser, path) as opened:
        keyboard = opened.page.keyboard
        for _ in range(2):
            keyboard.press("Tab")  # to the choice of shading, then to the chosen token
        keyboard.press("ArrowLeft")
        assert_shows(opened, model, ids, 0, 0, len(ids) - 2)
        keyboard.press("Home")
        keyboard.press("ArrowRight")
        keyboard.press("ArrowDown")
        assert_shows(opened, model, ids, 0, 0, 2)
        keyboard.press("Tab")  # to the heads
        keyboard.press("ArrowDown")
        keyboard.press("ArrowRight")
        assert_shows(opened, model, ids, 1, 1, 2)
        keyboard.press("ArrowUp")
        assert_shows(opened, model, ids, 0, 1, 2)
        keyboard.press("ArrowUp")  # there is no head above
        assert_shows(opened, model, ids, 0, 1, 2)
        keyboard.press("Tab")  # to the sizes of the map
        before = opened.page.eval_on_selector("#map", "map => map.clientWidth")
        keyboard.press("Enter")
        assert opened.page.eval_on_selector("#map", "map => map.clientWidth") < before
        stops = opened.page.locator("[tabindex='0'], input, button:not([tabindex])")
        assert stops.count() == 6, "of tokens and of heads only the chosen one is a stop"


def test_tokens_can_be_shaded_by_surprise(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    path, model, ids = small
    _, surprises = attention_and_surprise(model, ids)
    with Opened(browser, path) as opened:
        opened.page.check("input[value=surprise]")
        spans = opened.page.eval_on_selector_all(".token", "all => all.map(s => [s.title, s.style.background])")
        assert "nothing came before it" in spans[0][0]
        shades = [float(re.search(r"/ ([\d.]+)\)", background)[1]) for _, background in spans]  # type: ignore[index]
        for (title, _), shade, bits in list(zip(spans, shades, surprises, strict=True))[1:]:
            assert bits is not None and f"surprise {bits:.2f} bits" in title
            assert shade == pytest.approx(0.75 * bits / max(b for b in surprises if b is not None), abs=2e-3)


def test_markup_in_a_text_or_title_stays_text(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    path, _, _ = small
    with Opened(browser, path) as opened:
        assert opened.text("h1") == "A <b>title</b>"
        assert opened.page.locator("#text script, #text b, h1 b").count() == 0
        assert opened.page.eval_on_selector("#text", "all => all.textContent").replace("·", "") == TEXT
        assert opened.complaints == []


def test_markup_inside_one_token_stays_text(browser: Any, tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)>"
    tokenizer = ByteTokenizer()
    tokenizer.token_bytes = [*tokenizer.token_bytes[:65], markup.encode(), *tokenizer.token_bytes[66:]]
    write_attention_page(tmp_path / "page.html", sharp_model(BYTES), tokenizer, [65, 66], "title")
    with Opened(browser, tmp_path / "page.html") as opened:
        opened.page.hover(".token >> nth=1")
        assert opened.page.locator("img").count() == 0 and opened.complaints == []
        assert opened.text("#text") == f"{markup}B" and markup.replace(" ", "␣") in opened.text("#attended")


def test_each_small_map_is_drawn_from_the_weights_of_its_head(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    """A point of it is as strong as the strongest of the pairs that it stands for."""
    path, model, ids = small
    place = np.arange(len(ids)) * 64 // len(ids)
    look = "c => [...c.getContext('2d').getImageData(0, 0, 64, 64).data]"
    with Opened(browser, path) as opened:
        for layer in range(2):
            for head in range(3):
                weights = weights_of(model, ids, layer, head).numpy()
                strengths = np.zeros((64, 64))
                np.maximum.at(strengths, np.ix_(place, place), weights / weights.max(axis=1, keepdims=True))
                canvas = f"#heads button >> nth={3 * layer + head} >> canvas"
                blue = np.array(opened.page.eval_on_selector(canvas, look)).reshape(64, 64, 4)[:, :, 2]
                np.testing.assert_allclose(blue, 255 + (24 - 255) * strengths, atol=1.5)


def colour_at(opened: Opened, x: float, y: float) -> list[int]:
    """Red, green and blue of a pixel of the map."""
    look = "([x, y]) => [...document.getElementById('map').getContext('2d').getImageData(x, y, 1, 1).data]"
    return list(opened.page.evaluate(look, [x, y])[:3])


def test_the_map_is_drawn_from_the_weights_and_tells_the_pair_under_the_pointer(
    browser: Any, small: tuple[Path, GPT, list[int]]
) -> None:
    path, model, ids = small
    weights = weights_of(model, ids, 0, 0)
    row, T = 30, len(ids)
    most, least = int(weights[row].argmax()), int(weights[row, : row + 1].argmin())
    with Opened(browser, path) as opened:
        labels, cell = opened.page.evaluate("[state.labels, state.cell]")
        opened.page.locator("#map").scroll_into_view_if_needed()

        def colour(column: int) -> list[int]:
            return colour_at(opened, labels + (column + 0.5) * cell, labels + (row + 0.5) * cell)

        accent, paper = [214, 90, 24], [255, 255, 255]
        assert colour(most) == accent and colour(T - 1) == paper, "later positions are empty"
        share = (weights[row, least] / weights[row].max()).item()
        expected = [p + (a - p) * share for p, a in zip(paper, accent, strict=True)]
        np.testing.assert_allclose(colour(least), expected, atol=1.5)
        position = {"x": labels + (most + 0.5) * cell, "y": labels + (row + 0.5) * cell}
        opened.page.hover("#map", position=position)
        assert f"with weight {weights[row].max().item():.4f}" in opened.text("#pair")
        assert_shows(opened, model, ids, 0, 0, row)


def picture(opened: Opened) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(opened.page.screenshot())).convert("RGB"))


def test_light_and_dark_follow_the_reader(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    path, _, _ = small
    for scheme, lightness in (("light", (230, 256)), ("dark", (0, 50))):
        with Opened(browser, path, color_scheme=scheme) as opened:
            shot = picture(opened)
            assert lightness[0] <= np.median(shot) < lightness[1], scheme
            opened.page.locator("#frame").scroll_into_view_if_needed()
            corner = colour_at(opened, *opened.page.evaluate("[state.labels + state.cell * T - 2, state.labels + 2]"))
            assert lightness[0] - 10 <= corner[0] < lightness[1] + 10, "the map, too"


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, small: tuple[Path, GPT, list[int]]) -> None:
    path, model, ids = small
    with Opened(browser, path, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as opened:
        assert opened.page.evaluate("document.scrollingElement.scrollWidth") <= 360
        assert opened.page.eval_on_selector("#text", "box => box.clientWidth") > 280, "not beside something else"
        opened.page.tap(".token >> nth=5")
        assert_shows(opened, model, ids, 0, 0, 5)


def test_hangul_and_emoji_are_drawn_and_not_replaced_by_boxes(browser: Any, tmp_path: Path) -> None:
    """Each of them is spread over several tokens here. A box looks the same whatever it stands for."""
    text = "한글👩‍👧"
    write_attention_page(tmp_path / "page.html", sharp_model(BYTES), BYTES, BYTES.encode(text).tolist(), "title")
    with Opened(browser, tmp_path / "page.html") as opened:
        drawn = opened.page.evaluate(
            """() => ["한", "글", "\\u{10ffff}", "👩‍👧"].map(character => {
                 const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
                 context.font = `40px ${family}`;
                 context.fillText(character, 10, 60);
                 return canvas.toDataURL();
               })"""
        )
        assert len(set(drawn)) == 4
        assert opened.page.eval_on_selector("#text", "all => all.textContent").replace("·", "") == text
        first = opened.page.locator(".token").first
        assert first.inner_text() == "한" and first.get_attribute("aria-label") == "한"
        assert opened.page.locator(".token >> nth=1").get_attribute("aria-label") == "한 2/3"


def test_512_tokens_of_twelve_layers_and_heads_are_at_hand_in_seconds(browser: Any, tmp_path: Path) -> None:
    model = sharp_model(BYTES, n_layer=12, n_head=12)
    write_attention_page(tmp_path / "page.html", model, BYTES, [i * 7 % 256 for i in range(512)], "title")
    assert (tmp_path / "page.html").stat().st_size < 40e6
    with Opened(browser, tmp_path / "page.html") as opened:  # waits 30 seconds at most
        assert opened.page.locator("#heads button").count() == 144 and opened.page.locator(".token").count() == 512
        opened.page.hover(".token >> nth=100")
        assert "Token 101," in opened.text("#chosen") and opened.complaints == []


def test_a_browser_that_is_too_old_says_so(browser: Any, small: tuple[Path, GPT, list[int]], tmp_path: Path) -> None:
    page = small[0].read_text(encoding="utf-8").replace('"use strict";', "delete window.DecompressionStream;", 1)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with Opened(browser, tmp_path / "page.html") as opened:
        assert "too old" in opened.text("#problem")


# --- the command ----------------------------------------------------------------------------------------------------


def test_sample_writes_the_page_of_the_prompt_and_what_came_after(char_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    outcome = run_sample(f"--out_dir={char_run}", "--prompt=Line", "--max_new_tokens=9", f"--attention_page={path}")
    assert outcome.status == 0 and "13 tokens" in outcome.stderr, outcome.stderr
    assert "".join(token["text"] for token in page_data(path)["tokens"]) == outcome.stdout[:-1]
    alone = run_sample(f"--out_dir={char_run}", "--prompt=Line", "--max_new_tokens=0", f"--attention_page={path}")
    assert alone.status == 0 and len(page_data(path)["tokens"]) == 4, "a prompt alone"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attention_page=nowhere/out.html"], "expected a name that ends in .html, in a folder that exists"),
        (["--attention_page=."], "expected a name that ends in .html"),
        (["--attention_page=last.pt"], "expected a name that ends in .html"),
        (["--attention_page=a.html", "--num_samples=2"], "attention_page shows one text, but num_samples = 2"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_anything_is_generated(
    arguments: list[str], words: str, char_run: Path, here: Path
) -> None:
    outcome = run_sample(f"--out_dir={char_run}", *arguments)
    assert_clean_error(outcome, words)
    assert outcome.stdout == ""
