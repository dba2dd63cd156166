"""`noloco-node` of an earlier version: the manifest that its peer sends has a setting unknown to it.

Run it as a script with the arguments of `noloco-node`.
"""

from noloco_p2p.cli.node import main
from noloco_p2p.launch import settings

if __name__ == "__main__":
    read = settings.manifest_from_json
    settings.manifest_from_json = lambda data: read(data[:-1] + b',"of_a_later_version":1}')
    main()
