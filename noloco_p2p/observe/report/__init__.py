"""`noloco report`: one page about a run, from what its nodes wrote to their directories.

journals      the events of a node, read also from torn and rotated files
node_history  what these events say about one node
recorded_run  the figures of the run, from all its nodes
run_facts     how the run stands, its main figures, and what was trained with what
charts        the charts of the page
page          the page about one run or several, with page.html
series        the run as a CSV file
"""
