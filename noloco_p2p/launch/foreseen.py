"""Finds mistakes before any process starts, so that nobody waits for a node to find them.

A node makes the same checks, with the same functions. torch is only imported if model and device are not obviously
right.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from noloco_p2p.compute.model_family import check_split
from noloco_p2p.config import MAX_LAYERS, ListenSettings, NodeConfig, RunManifest
from noloco_p2p.core.messages import ITEM_BYTES
from noloco_p2p.errors import ConfigError, LocalError, NolocoError
from noloco_p2p.host import free_host_bytes
from noloco_p2p.humanize import plural, size_text
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.data.tokenizers import load_tokenizer
from noloco_p2p.io.dht.addresses import reserve_port
from noloco_p2p.launch import homes, join_file
from noloco_p2p.launch.settings import Overrides

PLAIN_FAMILY = "llama"
PLAIN_FIELDS = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)
"""Settings of a model that can be checked without importing its class: all are whole numbers, and no others are set."""
UNCHECKED = "auto", "cpu"
"""Devices that every machine has."""
SURE_COPIES = 4
"""Minimum multiples of the weights on the host, on any device: frozen rounds, a partner's vector, a checkpoint."""
PROCESS_BYTES = 2**27
"""Minimum memory of a node's process and its libp2p daemon, without the weights."""


def check_swarm(manifest: RunManifest, local: NodeConfig, run_dir: Path, say: Callable[[str], None]) -> None:
    """Check all that a swarm on this machine needs: data, tokenizer, device, model, memory, disk.

    `say` announces what takes a while. Raises ConfigError, LocalError, FileNotFoundError (no temporary directory).
    """
    tempfile.gettempdir()  # what nodes import needs one
    check_vocabulary(manifest, local)
    parameters = _plain_parameters(manifest)
    given = {"model_type": manifest.model.family, **manifest.model.config}
    if type(given.get("num_hidden_layers")) is int:
        check_split(SimpleNamespace(**given), manifest.stages)
    _check_fits(manifest, parameters or 0)
    if parameters is None or local.device not in UNCHECKED:
        say("checking model and device: importing torch …")
        from noloco_p2p.compute.factory import check_model, stage_sizes
        from noloco_p2p.compute.hardware import pick_device

        pick_device(local.device)
        check_model(manifest)
        parameters = sum(stage.parameters for stage in stage_sizes(manifest))
        _check_fits(manifest, parameters)
    if not _from_the_hub(manifest, local):
        make_batches(manifest, local, "")
    state_bytes = parameters * len(manifest.state_kinds) * ITEM_BYTES[manifest.compute_dtype]
    saved_bytes = state_bytes * manifest.start_replicas if local.checkpoint.every_steps is not None else 0
    homes.check_room(run_dir, saved_bytes, "a checkpoint of all nodes")


def _check_fits(manifest: RunManifest, parameters: int) -> None:
    """Raises LocalError if all nodes of a run with this many parameters together cannot fit this machine."""
    free, nodes = free_host_bytes(), manifest.stages * manifest.start_replicas
    weights = SURE_COPIES * parameters * manifest.start_replicas * ITEM_BYTES[manifest.compute_dtype]
    needed = weights + nodes * PROCESS_BYTES
    if free is not None and needed > free:
        raise LocalError(
            f"{plural(nodes, 'node')} {'needs' if nodes == 1 else 'need'} at least {size_text(needed)}, but this "
            f"machine has {size_text(free)} of free memory: use fewer nodes or a smaller model"
        )


def check_node(overrides: Overrides, join: Sequence[str], address_file: Path | None, *, runs: bool) -> None:
    """Check the command line of a node. `runs`: the node will run, so check its device, ports and address file too.

    Raises ConfigError, LocalError.
    """
    local = overrides.node()
    join_file.check(join)
    if not join:
        manifest = overrides.manifest()
        check_vocabulary(manifest, local)
        if local.stage is not None and local.stage >= manifest.stages:
            raise ConfigError(f"stage {local.stage}: the run has stages 0 to {manifest.stages - 1}")
    if runs:
        if local.device not in UNCHECKED:
            from noloco_p2p.compute.hardware import pick_device

            pick_device(local.device)
        for fault in filter(None, port_faults(local.listen).values()):
            raise fault
        if address_file is not None:
            join_file.remove(address_file)


def check_vocabulary(manifest: RunManifest, local: NodeConfig) -> None:
    """Check that the tokenizer fits the model, if it is on this machine. Raises ConfigError."""
    vocabulary = manifest.model.config.get("vocab_size")
    known = manifest.data.tokenizer == "bytes" or local.tokenizer_dir is not None
    if manifest.data.kind != "parquet" and known and isinstance(vocabulary, int):
        load_tokenizer(manifest.data.tokenizer, local.tokenizer_dir, vocabulary)


def port_faults(listen: ListenSettings) -> dict[str, NolocoError | None]:
    """For each port in the settings, why a node could not listen there; None if it could. Ports must differ."""
    ports = {name: port for name, port in listen if name.endswith("_port") and port is not None}
    faults: dict[str, NolocoError | None] = {}
    with ExitStack() as held:
        for name, port in ports.items():
            same = next((other for other in faults if port and ports[other] == port), None)
            try:
                held.enter_context(reserve_port(listen.host, port, f"listen.{name}"))
                both = f"listen.{same} and listen.{name} are both {port}: give each its own port"
                faults[name] = None if same is None else ConfigError(both)
            except LocalError as error:
                faults[name] = error
    return faults


def _from_the_hub(manifest: RunManifest, local: NodeConfig) -> bool:
    """Whether data or tokenizer come from the hub, which only a node contacts."""
    tokenizer = manifest.data.tokenizer != "bytes" and local.tokenizer_dir is None and manifest.data.kind != "parquet"
    return tokenizer or (manifest.data.dataset is not None and not local.data_files)


def _plain_parameters(manifest: RunManifest) -> int | None:
    """Number of parameters of a model that is obviously right for its stages; None for any other, right or wrong."""
    given: Mapping[str, object] = manifest.model.config
    values = [given.get(name) for name in PLAIN_FIELDS]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    others = set(given) - {*PLAIN_FIELDS, "tie_word_embeddings"}
    if len(numbers) < len(values) or others or given.get("tie_word_embeddings") is not False:
        return None
    hidden, layers, wide, heads, vocabulary, positions = numbers
    right = (
        manifest.model.family == PLAIN_FAMILY
        and hidden % (2 * heads) == 0  # the rotation of positions takes the values of a head in pairs
        and manifest.stages <= layers <= MAX_LAYERS
        and manifest.sequence_length <= positions
    )
    layer = 4 * hidden**2 + 3 * hidden * wide + 2 * hidden
    return 2 * vocabulary * hidden + layers * layer + hidden if right else None
