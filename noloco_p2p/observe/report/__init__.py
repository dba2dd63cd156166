"""`noloco report`: one page about a run, from what its nodes wrote into their directories.

journals  the lines of a node, torn and rotated ones included
story     what they say of one node
run       what the nodes say together: figures and series
chart     SVG: axes, curves, areas, columns
bars      SVG: bars of shares, and the life of every node
page      the page, with template.html
"""
