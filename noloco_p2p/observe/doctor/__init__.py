"""`noloco doctor`: is this machine fit to join, is the swarm that it would join well, and if not, who holds it up.

    examination.py   the order of the checks, and what they share
    telling.py       findings, told as they come, and the exit code
    machine.py       Python, packages, device, files, ports, the libp2p daemon
    needs.py         what the run asks of the machine: memory, disk, data
    peers.py         the join address, the run, clocks, who reaches whom
    speed.py         round trips and bandwidth, hence tokens/s and seconds per outer round
    home.py          a node's own directory, and the swarm as its node sees it

An observer: it joins the DHT under an identity of its own, announces nothing there, and removes what it wrote.
"""
