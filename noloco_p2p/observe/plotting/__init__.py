"""Charts as SVG: those of the report, of `noloco sim --plots` and of the experiments.

svg    elements, colours, style sheet, and a file of its own for a chart
axes   two axes and what is drawn between them
bars   horizontal bars
plots  curves and heatmaps as values, each drawn to a file
"""
