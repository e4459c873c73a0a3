"""The report: one self-contained page that argues for InLine with the figures of one's own runs.

`evidence` gathers and measures, as plain data that can be kept; `sections` says what each part shows; `charts`, `html`
and `page` make a page of it. Nothing here needs matplotlib: charts are SVG that follows the reader's colours.
"""
