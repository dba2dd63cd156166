"""The simulated world: the ports of `ports.py` in one process under virtual time, without sockets or torch."""
