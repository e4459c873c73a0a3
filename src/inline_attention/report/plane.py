"""The plane in which a query can be dragged: what of it does not move, and the numbers that `plane.js` needs."""

from __future__ import annotations

import json

from inline_attention.analysis.injectivity import COLLISION_TOLERANCE, KEYS, collision_cases
from inline_attention.ops.call import SMALLEST_MEAN_SCORE
from inline_attention.report.html import Html, tag

PANELS = (
    ("softmax", "softmax", "exp(score) ÷ their sum"),
    ("linear", "linear", "score ÷ their sum"),
    ("inline", "InLine", "(score − mean + 1) ÷ 6"),
)
GHOST = (0.2, 1.5, 0.5)  # smallest and largest place of the second query on the ray, and where it starts


def plane() -> Html:
    """The plane, its controls and three panels of weights; `plane.js` draws into them."""
    query = [float(value) for value in collision_cases()[0].queries[2]]
    settings = {"keys": KEYS, "query": query, "same": COLLISION_TOLERANCE, "smallest": SMALLEST_MEAN_SCORE}
    low, high, start = GHOST
    drawing = tag(
        "svg",
        tag("g", id="plane-still"),
        tag("g", tag("circle", r=26.0, class_="reach"), tag("circle", r=9.0, class_="query"), id="plane-query",
            tabindex="0", role="slider", aria_label="Query; the arrow keys move it, with Shift in larger steps",
            aria_valuenow="0", aria_valuetext=""),
        viewBox="0 0 300 300", id="plane-drawing", role="group",
        aria_label="A plane with six keys, a query, and a second query on the same ray",
    )  # fmt: skip
    slider = tag("label", "second query at ", tag("output", f"{start:g}", id="plane-factor"), " × the first",
                 tag("input", type="range", id="plane-ghost", min=low, max=high, step=0.05, value=start))  # fmt: skip
    maps = tag(
        "fieldset",
        tag("legend", "φ of linear and InLine"),
        *(
            tag("label", tag("input", type="radio", name="plane-map", value=value, checked=value == "relu"), name)
            for value, name in (("relu", "ReLU"), ("identity", "identity"))
        ),
    )
    panels = [
        tag(
            "figure",
            tag("figcaption", tag("b", label), tag("span", formula, class_="note")),
            tag("svg", viewBox="0 0 220 132", role="img", aria_label=f"Weights under {label}", id=f"plane-{kind}"),
            tag("p", id=f"plane-{kind}-verdict", class_="verdict"),
            class_=f"k-{kind} weights",
        )
        for kind, label, formula in PANELS
    ]
    key = tag("p", tag("span", class_="patch solid"), " the query ", tag("span", class_="patch outline"),
              " the second query", class_="note")  # fmt: skip
    data = Html(json.dumps(settings).replace("<", "\\u003c"))
    return tag(
        "div",
        tag("div", drawing, tag("div", slider, maps, key, class_="controls"), class_="plane-left"),
        tag("div", *panels, class_="plane-right"),
        tag("p", id="plane-spoken", class_="spoken", aria_live="polite"),
        tag("noscript", tag("p", "To drag the query, let this page run its script; the table below needs none.")),
        tag("script", data, type="application/json", id="plane-settings"),
        class_="plane",
    )
