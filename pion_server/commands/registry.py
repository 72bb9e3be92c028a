"""The command table: one decorated function is one command.

    @command("KV.PREFIX.OWNER", access=Access.TENANT, min_args=1, max_args=1, names="first")
    def owner(ctx: Context, args: Args) -> str:
        '''KV.PREFIX.OWNER <ns>

        `+<worker>` or `+-1`.
        '''
        worker = ctx.state.vstore.owner(bytes(args[0]))
        return str(worker)

* The first docstring line is the syntax. `COMMAND DOCS` and the arity error of dotted commands
  (`ERR KV.PREFIX.OWNER requires: <ns>`) come from it; `args="<ns>"` overrides the latter.
* `args` leaves out the command's name. Elements of at most 64 KiB are `bytes`, longer ones
  `memoryview`s of a buffer of their own, never reused: a command may keep either.
* The function answers a reply value (`wire.replies`), a list of them, a `Payload`, an
  `Offload(work)` whose `work()` dispatch runs in a thread, or is `async def`. It refuses by
  raising a `CommandError`; any other exception becomes `-ERR internal error …`.
* `Flag.WRITE`: all of it, Offload and awaits included, runs under the server-wide writer lock,
  but for the requests that `reads(args)` says only read.
* `access` says who may ask: `Access.ANYONE` before authentication, `Access.TENANT` a tenant too,
  whose stores are its own, `Access.ADMIN` nobody else. There is no default.
* `names` and `sids` say which arguments are namespaces (1..200 bytes) and sids (1..205): `"first"`,
  `"all"`, or a function from `args` to their positions. Dispatch checks them before any effect.
* With several workers a dotted command is answered by the one that holds the names it is about;
  the others turn it away. `claims(args)` says which requests may make a name of nobody's ours;
  with `anywhere` the function itself sees to what other workers hold (`ctx.state.homes`).

Modules of this package register by being there: dispatch imports all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from pion_server.payload import Buffer

if TYPE_CHECKING:
    from pion_server.state import ServerState
    from pion_server.wire.auth import Credentials
    from pion_server.wire.connection import Connection

Args: TypeAlias = list[Buffer]
Positions: TypeAlias = Literal["first", "all"] | Callable[[Args], Iterable[int]] | None

NAMESPACE_LIMIT = 200
SID_LIMIT = NAMESPACE_LIMIT + len("_attn")


class Flag(enum.Flag):
    """What dispatch must know about a command."""

    NONE = 0
    WRITE = enum.auto()


class Access(enum.Enum):
    """Who may give a command."""

    ANYONE = "before authentication"
    TENANT = "tenants and the admin"
    ADMIN = "the admin"


@dataclass(slots=True)
class Context:
    """What a command works with: the stores of who is asking, and the connection.

    `enter(tenant)` makes the connection a tenant's, or the admin's (None), authenticated.
    """

    state: ServerState
    connection: Connection
    credentials: Credentials
    enter: Callable[[bytes | None], None]


Handler: TypeAlias = Callable[[Context, Args], object]
HandlerT = TypeVar("HandlerT", bound=Handler)


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table."""

    name: str
    handler: Handler
    syntax: str
    arguments: str
    min_args: int
    max_args: int | None
    access: Access
    flags: Flag
    names: Positions
    sids: Positions
    # The enums again, for the hot path: asking one is slower than the rest of a PING.
    writes: bool
    open_to_all: bool
    admin_only: bool
    reads: Callable[[Args], bool] | None
    claims: Callable[[Args], bool] | None
    anywhere: bool

    def writes_with(self, args: Args) -> bool:
        """Whether a request with these arguments needs the writer lock."""
        return self.writes and (self.reads is None or not self.reads(args))

    @property
    def dotted(self) -> bool:
        """Whether it is one of ours, as opposed to one of Redis'."""
        return "." in self.name

    @property
    def arity(self) -> int:
        """As Redis counts: the name included, negative where more may follow."""
        least = self.min_args + 1
        return least if self.max_args == self.min_args else -least


COMMANDS: dict[bytes, Command] = {}


def command(
    name: str,
    *,
    access: Access,
    min_args: int,
    max_args: int | None = None,
    args: str | None = None,
    flags: Flag = Flag.NONE,
    names: Positions = None,
    sids: Positions = None,
    reads: Callable[[Args], bool] | None = None,
    claims: Callable[[Args], bool] | None = None,
    anywhere: bool = False,
) -> Callable[[HandlerT], HandlerT]:
    """Register the decorated function as command `name`; `max_args=None`: no upper bound."""

    def register(handler: HandlerT) -> HandlerT:
        key = name.upper().encode()
        lines = (handler.__doc__ or "").strip().splitlines()
        if key in COMMANDS:
            raise ValueError(f"two commands are called {name}")
        if not lines or not lines[0].upper().startswith(name.upper()):
            raise ValueError(f"{name}: the first docstring line must be its syntax")
        syntax = lines[0].strip()
        COMMANDS[key] = Command(
            name=name.upper(),
            handler=handler,
            syntax=syntax,
            arguments=args or syntax[len(name) :].strip(),
            min_args=min_args,
            max_args=max_args,
            access=access,
            flags=flags,
            names=names,
            sids=sids,
            writes=Flag.WRITE in flags,
            open_to_all=access is Access.ANYONE,
            admin_only=access is Access.ADMIN,
            reads=reads,
            claims=claims,
            anywhere=anywhere,
        )
        return handler

    return register


def always(args: Args) -> bool:
    """For `claims`: every request."""
    return True


def chosen(positions: Positions, args: Args) -> Args:
    """The arguments that `names` or `sids` point to."""
    if positions is None:
        return []
    if positions == "first":
        return args[:1]
    if positions == "all":
        return args
    return [args[position] for position in positions(args)]


def find_command(name: Buffer) -> Command | None:
    """The command of that name in any case, or None."""
    return COMMANDS.get(bytes(name[:64] if len(name) > 64 else name).upper())
