"""The hardest pictures, what the models take them for, and where they look."""

from __future__ import annotations

from inline_attention.report.cards import LEAST_FULL, picture_cards
from inline_attention.report.evidence import Evidence
from inline_attention.report.html import table
from inline_attention.report.sections.section import (
    Section,
    left_out,
    listed,
    reasons,
    runs_with,
)


def answers_section(evidence: Evidence) -> Section:
    """Hard pictures, what the models take them for, and where they look."""
    title = "Answers: the hardest pictures, and where the models look"
    runs = [run for run in evidence.runs if run.pictures]
    if not runs:
        return left_out("answers", title, evidence)
    answered = runs_with(evidence, "answers")
    rights = listed(
        f"{sum(answer['guess'] == answer['truth'] for answer in run.found['answers'])} of "
        f"{len(run.found['answers'])} right with {run.label}"
        for run in answered
    )
    header, body = ["model", "picture", "true class", "answer", "probability %", "of the true class %"], []
    for run in runs:
        by_index = {answer["index"]: answer for answer in run.found["answers"]}
        for picture in run.pictures:
            answer = by_index[picture["index"]]
            body.append([run.label, picture["name"], answer["truth"], answer["guess"],
                         f"{100 * answer['probability']:.1f}", f"{100 * answer['truth_probability']:.1f}"])  # fmt: skip
    return Section(
        "answers",
        title,
        "These are the pictures that the models, taken together, find hardest; each map shows which tokens the ringed "
        f"one attends to, orange above zero and blue below. Of all pictures tried, there were {rights}.",
        picture_cards(runs),
        table(header, body, caption="Answers to the pictures shown", text_columns=4),
        ("Maps: mean over the heads of the middle layer, without the 3×3 term; one scale for all maps of a picture, "
         f"fully coloured at the largest weight, or at {LEAST_FULL:g} times uniform attention.",
         *reasons(evidence, "answers"), *reasons(evidence, "maps")),
    )  # fmt: skip
