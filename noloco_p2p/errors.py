"""Every exception that this package raises on purpose, and what it means for *your* program.

    NolocoError
    ├── ConfigError      the configuration or the command line is wrong: tell the user, exit code 2
    │   └── OtherRun     the node's directory belongs to another run: use another directory
    ├── LocalError       this machine cannot do what was asked (a port in use, a full disk, no memory): exit code 2
    └── PeerError        another node is the reason; the run goes on without that one call
        ├── Unreachable  no answer, a broken link or a missed deadline: set the peer aside, use another one
        ├── Busy         back-pressure, not a failure: try another replica, or the same one later
        ├── Declined     the peer answered that it cannot serve this; it is healthy, use another one
        │   └── Stalled  the call ran out of time, without progress or in spite of it; nobody is at fault
        └── Violation    what arrived breaks the protocol or is not finite: never retry the same bytes

Foreign exceptions (grpc, hivemind, pydantic, OSError) are mapped to these in one place per adapter.
"""

NO_JSON = ValueError, RecursionError
"""The exceptions that `json.loads` raises for text that is not JSON or is nested too deeply."""


class NolocoError(Exception):
    """Base class of all errors of this package. `str(error)` is one line that says what is wrong and what to do."""


class ConfigError(NolocoError):
    """The configuration or the command line is wrong. Nothing has been started."""


class OtherRun(ConfigError):
    """A node's directory belongs to a different run than the one requested or joined."""


class LocalError(NolocoError):
    """This machine cannot do what was asked; the message names the port, path or device."""


class PeerError(NolocoError):
    """A call to another node did not return what was requested; nothing has changed on our side."""


class Unreachable(PeerError):
    """The peer did not answer: refused, reset, or silent until the deadline. The message says what was awaited."""


class Busy(PeerError):
    """The peer has no room at the moment. Neither side is at fault, and no peer is set aside.

    `late`: the refusal is sent with a delay, because strangers can provoke as many refusals of this kind as they like.
    """

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Declined(PeerError):
    """The peer is healthy but cannot serve this call (wrong stage, no such round, no live replica behind it)."""


class Stalled(Declined):
    """A call made no progress in the time it had, or took far longer than calls do. That proves neither that the peer
    failed nor that it is healthy."""


class Violation(PeerError):
    """What arrived is truncated, corrupt, of the wrong shape, of another run, or not finite.

    `ours`: it is what the peer says of something that *we* sent, and another replica would say the same if it is true.
    If not `ours`, the peer is at fault.
    """

    def __init__(self, message: str, *, ours: bool = False) -> None:
        super().__init__(message)
        self.ours = ours
