"""Charts as SVG: those of the report, of `noloco sim --plots` and of the experiments.

palette    colours and the style sheet, light and dark
svg        elements, and a file of its own for a chart
scales     axes as values: linear and logarithmic, with round numbers
axes       two axes as SVG, and what is drawn between them
time_bins  counts laid out over time
plots      plots, heatmaps and bars as values, each drawn to a file
"""
