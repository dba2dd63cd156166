"""`noloco-node` of a version that speaks another protocol.

Run it as a script with the arguments of `noloco-node`.
"""

from noloco_p2p.cli.node import main
from noloco_p2p.io.dht import join_handshake
from noloco_p2p.launch import bootstrap

if __name__ == "__main__":
    join_handshake.MANIFEST_CALL = "noloco/manifest/0"
    bootstrap.TIMES_AGAIN = 1
    main()
