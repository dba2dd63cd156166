"""`noloco report`: one page about a run, from what its nodes wrote into their directories.

journals      the events of a node, torn and rotated files included
recorded_run  what they say of each node, and what the nodes say together: figures
charts        the charts of the page
page          the page, with page.html
"""
