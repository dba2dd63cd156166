"""`noloco report`: one page about a run, from what its nodes wrote into their directories.

journals      the events of a node, torn and rotated files included
node_history  what they say of one node
recorded_run  what the nodes say together: figures
charts        the charts of the page
page          the page of one run or several, with page.html
"""
