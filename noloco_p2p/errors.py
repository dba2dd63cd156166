"""Every exception that this package raises on purpose, and what it means for *your* program.

    NolocoError
    ├── ConfigError      the configuration or the command line is wrong: tell the user, exit code 2
    │   └── OtherRun     the node's directory is of another run: use another directory
    ├── LocalError       this machine cannot do what was asked (a port in use, a full disk, no memory): exit code 2
    └── PeerError        another node is the reason; the run goes on without that one call
        ├── Unreachable  no answer, a broken link or a passed deadline: set the peer aside, use another one
        ├── Busy         back-pressure, not a failure: try another replica, or the same one later
        ├── Declined     the peer answered that it cannot serve this; it is healthy, use another one
        │   └── Stalled  the call got nowhere in the time that it had; nobody is at fault
        └── Violation    what arrived breaks the protocol or is not finite: never retry the same bytes

Foreign exceptions (grpc, hivemind, pydantic, OSError) are mapped to these at one place in each adapter.
"""

NO_JSON = ValueError, RecursionError
"""What `json.loads` raises for text that is not JSON, or is nested too deeply."""


class NolocoError(Exception):
    """Base of all errors of this package. `str(error)` is one line that says what is wrong and what to do."""


class ConfigError(NolocoError):
    """The configuration or the command line is wrong. Nothing has been started."""


class OtherRun(ConfigError):
    """A node's directory belongs to another run than the one that is asked for, or that was joined."""


class LocalError(NolocoError):
    """This machine cannot do what was asked; the message names the port, path or device."""


class PeerError(NolocoError):
    """A call to another node did not give what was asked; nothing was changed on our side."""


class Unreachable(PeerError):
    """The peer gave no answer: refused, reset, or silent until the deadline. The message names what was waited for."""


class Busy(PeerError):
    """The peer has no room now. Neither side is at fault, and no peer is set aside.

    `late`: refusals for this reason are given slowly, because strangers can cause as many as they like.
    """

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Declined(PeerError):
    """The peer is healthy and cannot serve this call (wrong stage, no such round, no live replica behind it)."""


class Stalled(Declined):
    """A call got nowhere in the time that it had: this proves nothing against its peer, nor that it is well."""


class Violation(PeerError):
    """The bytes that arrived are truncated, corrupt, of the wrong shape, of another run, or not finite.

    `ours`: the peer refused what *we* sent, so another replica would refuse it too; else the peer is at fault.
    """

    def __init__(self, message: str, *, ours: bool = False) -> None:
        super().__init__(message)
        self.ours = ours
