"""Draws all charts as SVG: those of the report, of `noloco sim --plots` and of the experiments.

svg        elements, their colours and style sheet (light and dark), and a chart as a self-contained file
axes       linear and logarithmic axes with round ticks; two of them drawn, with lines, dots and areas between them
labels     names of lines beside their ends
time_bins  counts per bin of time
plots      plots and bars as values, each drawn to a file
"""
