"""Charts as SVG: those of the report, of `noloco sim --plots` and of the experiments.

svg        elements, their colours and style sheet, light and dark, and a file of its own for a chart
axes       axes as values: linear and logarithmic, with round numbers; two of them drawn, and what is between them
time_bins  counts laid out over time
plots      plots, heatmaps and bars as values, each drawn to a file
"""
