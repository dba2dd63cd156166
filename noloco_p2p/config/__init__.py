"""The two kinds of settings: `RunManifest`, equal on all nodes and hashed into the run id, and `NodeConfig`, local.

One flat YAML file may hold both; no key belongs to both. `launch/settings.py` reads files, the environment and the
command line; this package only defines the values and checks them.
"""

from noloco_p2p.config.base import Positive, Seconds, Settings
from noloco_p2p.config.manifest import (
    MANIFEST_LIMIT_BYTES,
    MAX_LAYERS,
    DataSettings,
    EvaluationSettings,
    InnerSettings,
    ModelSettings,
    RunManifest,
    SecuritySettings,
    WireSettings,
)
from noloco_p2p.config.node_config import (
    AuditSettings,
    CheckpointSettings,
    DirectorySettings,
    LimitSettings,
    ListenSettings,
    NodeConfig,
)
from noloco_p2p.config.outer_settings import OuterSettings
