"""The other world: the ports of `ports.py` in one process under virtual time. Neither sockets nor torch."""
