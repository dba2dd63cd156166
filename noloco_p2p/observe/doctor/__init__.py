"""`noloco doctor`: is this machine fit to join, is the swarm healthy, and if not, which node holds it up.

    examination.py        the order of the checks, and what they share
    doctor_report.py      findings, shown as they come, and the exit code
    machine.py            Python, packages, device, files, ports, clock; a node's own directory
    run_requirements.py   what the run asks of the machine: memory, disk, data; what speed links and device promise
    peers.py              the join address, the run, clocks, which nodes can be reached

An observer: it joins the DHT under an identity of its own, announces nothing there, and removes what it wrote.
"""
