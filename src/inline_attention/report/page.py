"""The page: sections in a frame, with its style and script inside, and nothing that would have to be fetched."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from inline_attention.report.evidence import Evidence
from inline_attention.report.html import Html, table, tag
from inline_attention.report.sections import Section, all_sections
from inline_attention.support.files import write_atomically

TITLE = "Why InLine attention works"
# Nothing may be fetched, whatever a file or class is called; images are in the page itself.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(evidence: Evidence, path: Path) -> None:
    """Write the report over one from before, whole or not at all."""
    write_atomically(path, render(evidence))


def render(evidence: Evidence) -> str:
    """The page's text."""
    sections = all_sections(evidence)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", TITLE),
        tag("style", _asset("page.css")),
    )
    body = tag(
        "body",
        tag("a", "Skip to the argument", href="#injectivity", class_="skip"),
        _top(evidence, sections),
        tag("main", *(_section(number, section) for number, section in enumerate(sections, start=1))),
        _foot(evidence),
        tag("script", _asset("plane.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _top(evidence: Evidence, sections: list[Section]) -> Html:
    links = [tag("li", tag("a", section.title.partition(":")[0], href=f"#{section.name}")) for section in sections]
    rows = []
    for run in evidence.runs:
        epochs = [] if run.curves is None else run.curves.epochs
        last = epochs[-1] if epochs else None
        top1 = None if last is None else last.top1 if last.averaged_top1 is None else last.averaged_top1
        accuracy = "–" if top1 is None else f"{top1:.2f}"
        rows.append([run.label, accuracy, str(len(epochs)), run.dataset, run.model_name])
    header = ["run", "top-1 %", "epochs", "data", "model"]
    if all(run.label == run.model_name for run in evidence.runs):
        header.pop()
        rows = [row[:-1] for row in rows]
    return tag(
        "header",
        tag("h1", TITLE),
        tag("p", "The argument: linear attention is cheap, but gives different queries the same weights, and does not "
                 "look at what lies next to a token; InLine attention repairs both at the same cost. This page checks "
                 "each step on the runs below, and shows what comes out, whether it fits the argument or not."),
        tag("nav", tag("ol", *links), aria_label="Parts of this page"),
        tag("div", table(header, rows, caption="Runs, with the accuracy after their last epoch"),
            class_="runs"),
        class_="top",
    )  # fmt: skip


def _section(number: int, section: Section) -> Html:
    heading = f"{section.name}-title"
    return tag(
        "section",
        tag("h2", tag("span", f"{number}", class_="step"), section.title, id=heading),
        tag("p", section.lead) if section.lead else None,
        section.content,
        *(tag("p", note, class_="note") for note in section.notes),
        None if section.figures is None else tag("details", tag("summary", "The numbers"), section.figures),
        id=section.name,
        aria_labelledby=heading,
    )


def _foot(evidence: Evidence) -> Html:
    environment = evidence.environment
    names = ("machine", "gpu", "timm", "inline_attention", "commit", "date")
    facts = ", ".join(f"{name.replace('_', '-')} {environment[name]}" for name in names if name in environment)
    return tag("footer", tag("p", "Written by ", tag("code", "inline report"), f": {facts}.", class_="note"))


def _asset(name: str) -> Html:
    """A file of this package as it is: style and script are ours, and must not be escaped."""
    return Html(resources.files("inline_attention.report").joinpath(name).read_text(encoding="utf-8"))
