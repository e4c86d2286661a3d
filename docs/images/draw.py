"""Draws decode_cpu.svg from decode_cpu.json: python docs/images/draw.py (needs matplotlib, the extra `bench`)."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLOURS = ("#b0b7c3", "#4c8bf5", "#ee6c4d")


def main() -> None:
    figures = json.loads((HERE / "decode_cpu.json").read_text())
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "decode_cpu", "font.family": "sans-serif", "font.size": 10}
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    series = figures["output tokens per second"]
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(values))]
        bars = axes.bar(places, values, width * 0.92, label=name, color=COLOURS[number])
        axes.bar_label(bars, labels=[f"{value:g}" for value in values], padding=2, fontsize=9)
    axes.set_xticks(range(len(figures["batch"])), [f"{batch} at once" for batch in figures["batch"]])
    axes.set_ylabel("output tokens per second")
    axes.set_title(figures["title"], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.text(0.01, 0.01, figures["note"], fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(HERE / "decode_cpu.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
