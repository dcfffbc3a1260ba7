"""The whole page: an introduction, and every table and figure of every paper in order, or why it is not there."""

from mixlab.evals.cost.compute import TFLOPS
from mixlab.models.papers import papers
from tools.reproduce.rows import sections_of
from tools.reproduce.tables import paper_tables
from tools.reproduce.trainings import Printed

INTRODUCTION = f"""# Reproducing the papers' tables

*`make reproduce` writes this page from `mixlab/configs` (models, recipes) and `tools/reproduce`.*

Every table and figure of the five papers is here, with the paper's figures, the recipes that lead to them, and an
estimate of the cost; or it is named at the end of its paper, with the reason. Trainings follow in an order in which
they can run; what is measured may take weights of a later table. A run that several tables share has its command in the
first of them. `imagenet`, `ade20k:PATH`, `C` (ImageNet-C) and so on are [your copies of the data](data.md).

**The figures are the papers'. None of these trainings has been repeated here: that takes GPUs.** What is tested: the
parameters, multiply-accumulates and logits of the models; that `mixlab` takes every command below; and that every
command runs through with small models, a few images and one update.

GPU hours are arithmetic: three forward passes per training image, two operations per multiply-accumulate, at
{TFLOPS:g} TFLOP/s achieved on each GPU,

    hours = 2 x 3 x MACs(image size) x images x epochs / ({TFLOPS:g} x 10^12 x 3600).

An A100 can do 312 TFLOP/s in bf16 at best. Recurrent and small models get far less than {TFLOPS:g} out of it: read the
column as a lower bound there, and count with a rate of your own (`mixlab bench MODEL --compute --recipe NAME`).
Evaluation is not counted; "all" includes the phases before; detectors are counted at 800 x 1280 px. Batch sizes are
global: see [scale-out](scale.md). To read an accuracy off finished weights:
`mixlab eval runs/.../final.safetensors imagenet`.

- **Other authors' models.** `timm:NAME` is a backbone that a paper compares its own with. Its figure is cited in the
  paper; the command trains it as the paper trains its own. Models that neither Mixlab nor timm has
  [stay out](paper_and_code.md#what-stays-out), and so do rows that only cite an ImageNet accuracy.
- **DeiT and DeiT-III.** Vision-LSTM trained DeiT-III-T itself. Its Table 1 cites the accuracies of sizes S and B,
  whose recipe is not in the paper: they start from the weights that DeiT-III's authors published (`released`). DeiT's
  accuracies are cited too; `deit_imagenet` is its authors' recipe.
"""


def page() -> str:
    """The whole page as Markdown."""
    lines, printed = [INTRODUCTION], Printed()
    for key, paper in papers().items():
        lines += [f"## {paper.title}", "", f"{paper.authors[0]} et al., arXiv {paper.arxiv}.", ""]
        for title, parts in sections_of(key).items():
            lines += [f"### {title}", ""]
            for part in parts:
                lines += part.lines(printed)
        lines += left_out(key)
    return "\n".join(lines).rstrip() + "\n"


def left_out(paper: str) -> list[str]:
    """The tables and figures of a paper that are not on the page, with the reasons."""
    reasons = [f"- {title}: {reason}." for title, reason in paper_tables()[paper].left_out.items()]
    return ["### Not on this page", "", *reasons, ""]
