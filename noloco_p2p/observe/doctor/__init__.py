"""`noloco doctor`: whether this machine can join, whether the swarm is healthy, and if not, which node holds it up.

    examination.py        the order of the checks, and what they share
    doctor_report.py      the findings, printed as they come, and the exit code
    machine.py            Python, packages, device, files, ports, clock; a node's own directory
    run_requirements.py   what the run needs of the machine: memory, disk, data; the speed to expect
    peers.py              the join address, the run, clocks, which nodes can be reached

The doctor is an observer: it joins the DHT under an identity of its own, announces nothing, and removes what it wrote.
"""
