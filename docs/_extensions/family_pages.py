"""The pages of families: `families.md` lists them, in the order of the table of families.

`{family} flash` in a page becomes a table of facts computed by the code, and the picture of the family's attention
mask. Its content is the formula for the parameters of a layer.
"""

from base_facts import LENGTHS, base_facts, paper_link
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flash_lm.config import keys
from flash_lm.config.registry import FAMILIES
from flash_lm.families.family import Family
from flash_lm.models.facts import Facts

_HERE = "% every family\n"
_POSITIONS = {"none": "", "learned": "learned", "sinusoid": "sinusoids", "scaled_sinusoid": "scaled sinusoids"}
_BIASES = {
    "toeplitz": "a learned relative bias (Toeplitz)",
    "rope": "a relative bias from rotated vectors",
    "t5": "a relative bias in buckets",
}


def _positions(facts: Facts) -> str:
    config, keys = facts.config, FAMILIES[facts.config.family].reads()
    names = [_POSITIONS[config.absolute_positions], "rotary" if config.rotary else ""]
    of_biases = [name.removeprefix("model.") for name in sorted(keys) if name.endswith(".relative_bias")]
    names += [_BIASES.get(str(config.get(name)), "") for name in of_biases]
    names += (
        ["a position bias inside the attention"] if "model.aft.window" in keys or "model.aft.bias_dim" in keys else []
    )
    return ", ".join(name for name in names if name)


def _keys(row: Family) -> str:
    sections = {kind for part in row.sublayers for kind in part.sections}
    names = [name for name, kind in keys.SECTIONS.items() if kind in sections]
    return ", ".join(f"`{name}.*`" for name in names) or "none beyond those that all families share"


def _state(facts: Facts) -> str:
    if not facts.state_bytes:
        return "does not decode"
    short, long = (f"{size / 1e6:,.2f} MB" for size in facts.state_bytes.values())
    return f"{short} after 1k tokens, {long} after 64k" if facts.state_grows else f"{short} at any length"


class FamilyFacts(SphinxDirective):
    """Facts about a family that the code computes, at the size of configs/flash_base.py."""

    has_content = True
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A list and a picture."""
        self.env.note_reread()  # the code may have changed where no file of the page has
        name = self.arguments[0]
        facts = base_facts(name)
        flops = " and ".join(f"{facts.flops[n] / 1e6:,.0f} million at length {n:,}" for n in LENGTHS)
        # Facts as a table, then the picture.
        lines = {
            "Name": f"`--config.model.family={name}`",
            "Paper": paper_link(name),
            "One layer": ", then ".join(f"`{sublayer}`" for sublayer in facts.sublayers)
            .replace("(", "` over `")
            .replace(")", ""),
            "Positions": _positions(facts),
            "Parameters": f"{facts.parameters / 1e6:.1f} million",
            "Parameters of a layer": f"${self.content[0]}$",
            "Decode state per sequence": _state(facts),
            "Forward FLOPs per token": flops,
            "Keys": _keys(FAMILIES[name]),
        }
        text = "\n".join(f"| {label} | {value} |" for label, value in lines.items() if value)
        head = "| | |\n|---|---|\n"
        picture = f"![Attention mask of {name}: the keys that each query sees](pictures/{name}.svg)\n"
        return self.parse_text_to_nodes(f"{head}{text}\n\n{picture}")


def _with_list(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "families":
        rows = [
            f"| [`{family}`](families/{family}.md) | {row.about} | {paper_link(family)} |"
            for family, row in FAMILIES.items()
        ]
        table = "\n".join(["| `model.family` | one layer | paper |", "|---|---|---|", *rows])
        pages = "\n".join(f"families/{family}" for family in FAMILIES)
        source[0] = source[0].replace(_HERE, f"{table}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive, and inserts the list when the page is read."""
    app.add_directive("family", FamilyFacts)
    app.connect("source-read", _with_list)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
