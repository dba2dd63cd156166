"""The two kinds of settings: `RunManifest`, equal on all nodes and hashed into the run id, and `NodeConfig`, local.

One flat YAML file may hold both; no key belongs to both. `launch/settings.py` reads files, the environment and the
command line; here are only the values and their checks.
"""

from noloco_p2p.config.base import Positive as Positive
from noloco_p2p.config.base import Seconds as Seconds
from noloco_p2p.config.base import Settings as Settings
from noloco_p2p.config.manifest import MANIFEST_LIMIT_BYTES as MANIFEST_LIMIT_BYTES
from noloco_p2p.config.manifest import MOST_LAYERS as MOST_LAYERS
from noloco_p2p.config.manifest import DataSettings as DataSettings
from noloco_p2p.config.manifest import EvaluationSettings as EvaluationSettings
from noloco_p2p.config.manifest import InnerSettings as InnerSettings
from noloco_p2p.config.manifest import ModelSettings as ModelSettings
from noloco_p2p.config.manifest import RunManifest as RunManifest
from noloco_p2p.config.manifest import SecuritySettings as SecuritySettings
from noloco_p2p.config.manifest import WireSettings as WireSettings
from noloco_p2p.config.node_config import AuditSettings as AuditSettings
from noloco_p2p.config.node_config import CheckpointSettings as CheckpointSettings
from noloco_p2p.config.node_config import DirectorySettings as DirectorySettings
from noloco_p2p.config.node_config import LimitSettings as LimitSettings
from noloco_p2p.config.node_config import ListenSettings as ListenSettings
from noloco_p2p.config.node_config import NodeConfig as NodeConfig
from noloco_p2p.config.outer_settings import OuterSettings as OuterSettings
