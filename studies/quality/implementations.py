"""Compares public implementations with ours, trained on the same batches, to find faults of ours.

Each has one seed, so the results are no verdicts and have other words.
"""

from collections.abc import Sequence

from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, group_lines
from studies.protocol.verdict import ALIKE, Rule

FACTORS = (1.0, 0.5, 2.0)  # times our rate: the rates of each peer, by priority
AGREES, DIFFERS, UNFINISHED, FAILED = "no sign of a fault", "to be examined", "unfinished", "failed"
OTHER_TARGETS = "not scored on the same targets"
_COLUMNS: Columns = {
    "public code": ("peer", "{}"),
    "ours": ("ours", "{}"),
    "its best rate": ("rate", "{:g}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "of ours": ("ours_perplexity", "{:.2f}"),
    "ratio": ("ratio", "{:.3f}"),
    "failed": ("failed", "{}"),
    "result": ("result", "{}"),
}


def peer_rates(peer: str, ours: float) -> tuple[float, ...]:
    """Returns the rates of a peer; a changed peer, PEER/CHANGE, is trained at our rate alone.

    >>> peer_rates("llama", 0.002), peer_rates("llama/our_values", 0.002)
    ((0.002, 0.001, 0.004), (0.002,))
    """
    factors = FACTORS[:1] if "/" in peer else FACTORS
    return tuple(float(f"{factor * ours:.3g}") for factor in factors)


def compare_implementations(lines: Sequence[Line]) -> list[Line]:
    """Returns a line per peer: its best rate by the validation split, and its and our perplexity on the test split.

    Args:
        lines: lines of a study's runs; those of peers have `beside`, the name of our model in their part.
    """
    return [
        _compare_peer(peer_lines, lines)
        for peer_lines in group_lines([line for line in lines if "beside" in line], "peer").values()
    ]


def _compare_peer(peer_lines: Sequence[Line], lines: Sequence[Line]) -> Line:
    """Compares one peer with ours; runs at other rates than `peer_rates` do not count, such as from an older search."""
    peer, at, ours_name = (peer_lines[0][key] for key in ("peer", "part", "beside"))
    # Our lines, and the peer's lines at the rates that count.
    ours = [line for line in lines if (line["part"], line["run"]) == (at, ours_name) and "slice" not in line]
    rates = peer_rates(peer, ours[0]["rate"]) if ours else ()
    peer_lines = [line for line in peer_lines if line["rate"] in rates]
    ours_test = [line for line in ours if line.get("split") == "test" and line["length"] == line["trained_length"]]
    select_split = lambda split: {line["run"]: line for line in peer_lines if line.get("split") == split}
    validation, test = select_split("validation"), select_split("test")
    lost = [line["run"] for line in peer_lines if "failed" in line]
    comparison: Line = {"peer": peer, "ours": ours_name, "failed": len(lost), "result": UNFINISHED}
    if ours and (len(lost) == len(rates) or any("failed" in line for line in ours)):
        return comparison | {"result": FAILED}
    if len(validation) + len(lost) < len(rates) or not ours_test:
        return comparison
    # The best rate on the validation split is compared on the test split.
    best = test[min(validation.values(), key=lambda line: line["perplexity"])["run"]]
    ours_best = next((line for line in ours_test if _identity(line) == _identity(best)), None)
    if ours_best is None:
        return comparison | {"result": OTHER_TARGETS}
    ratio = best["perplexity"] / ours_best["perplexity"]
    return comparison | {
        "rate": best["rate"],
        "perplexity": best["perplexity"],
        "ours_perplexity": ours_best["perplexity"],
        "ratio": ratio,
        "result": AGREES if Rule("alike").holds(ratio) else DIFFERS,
    }


def _identity(line: Line) -> tuple:
    """Returns what two lines must share to be compared: the seed and the targets."""
    return line["seed"], line["corpus_hash"], line["tokens_blocks"]


def implementations_table(lines: Sequence[Line]) -> str:
    """Returns a Markdown table.

    Args:
        lines: lines of `compare_implementations`.
    """
    rule = f"The best of {len(FACTORS)} rates by the validation split; code that we changed (/) has our rate alone"
    alike = f"Perplexities of the test split, alike within {ALIKE:g}"
    return f"Public code and ours, one seed. {rule}. {alike}.\n\n{markdown_table(lines, _COLUMNS)}"
