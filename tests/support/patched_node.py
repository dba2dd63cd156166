"""`noloco-node` with a Llama that stays in float64, for the test that compares real processes with the reference.

Run it as a script with the arguments of `noloco-node`. It changes the classes before the node builds its model.
"""

from reference import float64_llama

from noloco_p2p.cli.node import main

if __name__ == "__main__":
    with float64_llama():
        main()
