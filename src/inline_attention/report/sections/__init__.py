"""The parts of the report: what each shows in two sentences, a chart, and the figures behind it.

Sentences that state a result are made from the figures; where there are none, the part says why in one sentence.
"""

from __future__ import annotations

from inline_attention.report.evidence import Evidence
from inline_attention.report.sections.ablation import ablation_section
from inline_attention.report.sections.answers import answers_section
from inline_attention.report.sections.confusion import confusion_section
from inline_attention.report.sections.cost import cost_section
from inline_attention.report.sections.curves import curves_section
from inline_attention.report.sections.injectivity import injectivity_section
from inline_attention.report.sections.locality import locality_section
from inline_attention.report.sections.masking import masking_section
from inline_attention.report.sections.section import Section

__all__ = ["Section", "all_sections"]


def all_sections(evidence: Evidence) -> list[Section]:
    """In the order of the argument."""
    return [
        injectivity_section(),
        confusion_section(evidence),
        locality_section(evidence),
        masking_section(evidence),
        ablation_section(evidence),
        cost_section(evidence.cost, evidence.cost_machine),
        curves_section(evidence),
        answers_section(evidence),
    ]
