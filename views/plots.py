"""Pictures of numbers, drawn by Matplotlib, which is imported only when one is drawn.

Knows nothing of models and runs; it is given the numbers.
"""

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]  # of a metrics.jsonl
MANUAL_COLOUR, SDPA_COLOUR = "tab:blue", "tab:orange"
KOREAN_FONTS = ("Noto Sans CJK KR", "Noto Sans KR", "NanumGothic", "Malgun Gothic", "Apple SD Gothic Neo")
DASHES = ("-", "--", ":", "-.")


def column(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """The steps that have a number of that name, and the numbers."""
    found = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in found], [value for _, value in found]


def run_picture(lines: Lines, title: str) -> bytes:
    """Training and validation loss, learning rate and gradient norm of one run, as PNG."""
    figure = _figure(9, 7)
    axes = figure.subplot_mosaic([["loss", "loss"], ["learning rate", "gradient norm"]])
    _losses(axes["loss"], {"": lines})
    axes["loss"].set_title(_plain(title))
    for name in ("learning rate", "gradient norm"):
        axes[name].plot(*column(lines, name.replace(" ", "_")), linewidth=1)
        _label(axes[name], name)
    return _png(figure)


def runs_picture(runs: Mapping[str, Lines]) -> bytes:
    """The losses of several runs together, as PNG."""
    figure = _figure(9, 5)
    _losses(figure.add_subplot(), runs)
    return _png(figure)


def comparison_picture(comparison: Mapping[str, Any]) -> bytes:
    """Time, memory and learning curves of manual and fused attention, as PNG.

    Args:
        comparison: what compare.json holds, with one of the two at least.
    """
    speed, curves = comparison.get("speed", ()), comparison.get("curves")
    rows = [["time", "memory"]] * bool(speed) + [["loss", "loss"], ["difference", "difference"]] * bool(curves)
    figure = _figure(10, 4 * len(rows))
    axes = figure.subplot_mosaic(rows)  # type: ignore[arg-type]  # a list is invariant there
    if speed:
        _by_length(axes["time"], speed, lambda path: path["step"] and 1000 * path["step"]["median"], "ms")
        _by_length(axes["memory"], speed, lambda path: path["megabytes"], "peak MB")
    if curves:
        for name, colour, width in (("manual", MANUAL_COLOUR, 3.0), ("sdpa", SDPA_COLOUR, 1.0)):
            axes["loss"].plot(curves["steps"], curves[name], color=colour, linewidth=width, label=name)
        _label(axes["loss"], "training loss, nats per token")
        axes["loss"].legend()
        axes["difference"].axhline(0, color="gray", linewidth=0.5)
        axes["difference"].plot(curves["steps"], curves["difference"], linewidth=1)
        _label(axes["difference"], "SDPA's loss minus manual's")
    return _png(figure)


def _by_length(axes: "Axes", speed: Iterable[Mapping[str, Any]], value: Any, unit: str) -> None:
    """One line a path and precision, over the lengths; a length that failed leaves a gap."""
    from matplotlib.ticker import LogLocator, NullLocator

    rows, drawn = list(speed), []
    for dash, dtype in zip(DASHES * len(rows), dict.fromkeys(row["dtype"] for row in rows), strict=False):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        for path, colour in (("manual", MANUAL_COLOUR), ("sdpa", SDPA_COLOUR)):
            heights = [value(row[path]) or math.nan for row in of_dtype]
            drawn += [height for height in heights if height > 0]
            lengths = [row["length"] for row in of_dtype]
            axes.plot(lengths, heights, dash, marker="o", markersize=3, color=colour, label=f"{path}, {dtype}")
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(lengths, [str(length) for length in lengths])
    if drawn:  # memory is not told by every system
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_locator(NullLocator())
    _label(axes, f"forward and backward, {unit}", "context length T")
    axes.legend()


def _losses(axes: "Axes", runs: Mapping[str, Lines]) -> None:
    """Training losses thin, validation losses with a mark each, in one colour a run."""
    for number, (name, lines) in enumerate(runs.items()):
        colour, before = f"C{number}", f"{_plain(name)}: " if name else ""
        axes.plot(*column(lines, "loss"), color=colour, linewidth=1, alpha=0.6, label=f"{before}training")
        if column(lines, "val_loss")[0]:
            axes.plot(*column(lines, "val_loss"), color=colour, marker="o", label=f"{before}validation")
    _label(axes, "loss, nats per token")
    axes.legend()


def _plain(text: str) -> str:
    """A name as it is: Matplotlib would set $...$ as a formula, and hide a label that begins with _."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _label(axes: "Axes", vertical: str, horizontal: str = "updates") -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)


def _figure(width: float, height: float) -> "Figure":
    """A figure of its own, with no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: "Figure") -> bytes:
    """The figure as a file; names in Korean are drawn where a font for them is installed."""
    from matplotlib.font_manager import fontManager
    from matplotlib.text import Text

    installed = {font.name for font in fontManager.ttflist}
    families = ["DejaVu Sans", *(name for name in KOREAN_FONTS if name in installed)]
    file = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_fontfamily(families)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
