"""Commands about the connection itself: greeting, password, name, goodbye."""

from __future__ import annotations

import time

from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import AuthRequired, BadArgument, CommandError, printable
from pion_server.wire.connection import Connection
from pion_server.wire.replies import Verbatim

# The Redis version whose behaviour clients may expect.
REDIS_VERSION = "7.0.0"


class UnknownProtocol(CommandError):
    """HELLO with a version other than 2 and 3."""

    prefix = "NOPROTO"


@command("PING", access=Access.TENANT, min_args=0, max_args=1)
def ping(ctx: Context, args: Args) -> object:
    """PING [message]"""
    return args[0] if args else "PONG"


@command("ECHO", access=Access.TENANT, min_args=1, max_args=1)
def echo(ctx: Context, args: Args) -> object:
    """ECHO message"""
    return args[0]


@command("HELLO", access=Access.ANYONE, min_args=0)
def hello(ctx: Context, args: Args) -> object:
    """HELLO [2|3 [AUTH user password] [SETNAME name]]

    Everything is checked before anything changes.
    """
    connection = ctx.connection
    protocol = connection.protocol
    credentials: Args | None = None
    name: str | None = None
    if args:
        protocol = _read_protocol(bytes(args[0][:16]))
    rest = list(args[1:])
    while rest:
        word = bytes(rest.pop(0)[:16]).upper()
        if word == b"AUTH" and len(rest) >= 2:
            credentials, rest = rest[:2], rest[2:]
        elif word == b"SETNAME" and rest:
            name = read_label(rest.pop(0), "Client names")
        else:
            raise BadArgument(f"Syntax error in HELLO option '{printable(word)}'")
    if credentials is not None:
        tenant = ctx.credentials.tenant(credentials[0])
        refusal = ctx.credentials.check(tenant, credentials[1])
        if refusal is not None:
            return refusal
        ctx.enter(tenant)
    elif not connection.authenticated:
        raise AuthRequired(
            "HELLO must be called with the client already authenticated, otherwise the HELLO "
            "<proto> AUTH <user> <pass> option can be used to authenticate the client and select "
            "the RESP protocol version at the same time"
        )
    connection.protocol = protocol
    if name is not None:
        connection.name = name
    return {
        b"server": b"pion",
        b"version": REDIS_VERSION.encode(),
        b"proto": protocol,
        b"id": connection.id,
        b"mode": b"standalone",
        b"role": b"master",
        b"modules": [],
    }


def _read_protocol(word: bytes) -> int:
    if word in (b"2", b"3"):
        return int(word)
    if word.isdigit():
        raise UnknownProtocol("unsupported protocol version")
    raise BadArgument("Protocol version is not an integer or out of range")


@command("AUTH", access=Access.ANYONE, min_args=1, max_args=2)
def auth(ctx: Context, args: Args) -> object:
    """AUTH [user] password"""
    tenant = ctx.credentials.tenant(args[0]) if len(args) == 2 else None
    refusal = ctx.credentials.check(tenant, args[-1])
    if refusal is not None:
        return refusal
    ctx.enter(tenant)
    return "OK"


@command("SELECT", access=Access.TENANT, min_args=1, max_args=1)
def select(ctx: Context, args: Args) -> str:
    """SELECT 0"""
    index = bytes(args[0][:16])
    if index == b"0":
        return "OK"
    if index.removeprefix(b"-").isdigit():
        raise BadArgument("DB index is out of range")
    raise BadArgument("invalid DB index")


@command("QUIT", access=Access.ANYONE, min_args=0)
def quit_connection(ctx: Context, args: Args) -> str:
    """QUIT"""
    ctx.connection.closing = True
    return "OK"


@command("RESET", access=Access.ANYONE, min_args=0, max_args=0)
def reset(ctx: Context, args: Args) -> str:
    """RESET

    Back to a fresh connection: RESP2, no name, not authenticated.
    """
    connection = ctx.connection
    connection.protocol = 2
    connection.name = ""
    ctx.enter(None)
    connection.authenticated = not ctx.credentials.needed
    return "RESET"


def read_label(text: bytes | bytearray | memoryview, what: str) -> str:
    """A client or library name: printable ASCII without spaces, at most 256 bytes."""
    word = bytes(text[:257])
    if len(word) > 256 or not all(0x21 <= byte <= 0x7E for byte in word):
        raise BadArgument(f"{what} cannot contain spaces, newlines or special characters.")
    return word.decode()


_CLIENT_HELP = [
    "CLIENT <subcommand>. Subcommands are:",
    "GETNAME, SETNAME <name>, SETINFO LIB-NAME|LIB-VER <value>, ID, INFO, LIST",
    "NO-EVICT ON|OFF, NO-TOUCH ON|OFF, REPLY ON, TRACKING OFF, MAINT_NOTIFICATIONS …",
]


@command("CLIENT", access=Access.TENANT, min_args=1)
def client(ctx: Context, args: Args) -> object:
    """CLIENT subcommand [argument ...]"""
    word = bytes(args[0][:32]).upper()
    rest = args[1:]
    connection = ctx.connection
    match word, len(rest):
        case b"SETNAME", 1:
            connection.name = read_label(rest[0], "Client names")
            return "OK"
        case b"GETNAME", 0:
            return connection.name.encode() or None
        case b"ID", 0:
            return connection.id
        case b"SETINFO", 2:
            return _set_info(connection, rest)
        case b"INFO", 0:
            return Verbatim(_describe(connection) + "\n")
        case b"LIST", _:
            known = ctx.state.connections.values()
            # A tenant's list is of its own connections; the admin sees all.
            shown = (c for c in known if connection.tenant in (None, c.tenant))
            return Verbatim("".join(_describe(c) + "\n" for c in shown))
        case ((b"NO-EVICT" | b"NO-TOUCH"), 1) if bytes(rest[0][:8]).upper() in (b"ON", b"OFF"):
            return "OK"
        case b"REPLY", 1 if bytes(rest[0][:8]).upper() == b"ON":
            return "OK"
        case b"TRACKING", 1 if bytes(rest[0][:8]).upper() == b"OFF":
            return "OK"
        case b"GETREDIR", 0:
            return -1
        case b"MAINT_NOTIFICATIONS", n if n >= 1:
            # Nothing is ever announced: this server has no planned moves to tell about.
            return "OK"
        case b"HELP", 0:
            return list(_CLIENT_HELP)
        case _:
            raise BadArgument(
                f"unknown subcommand or wrong number of arguments for '{printable(word)}'. "
                "Try CLIENT HELP."
            )


def _set_info(connection: Connection, rest: Args) -> str:
    attribute = bytes(rest[0][:16]).upper()
    if attribute == b"LIB-NAME":
        connection.library = read_label(rest[1], "lib-name")
    elif attribute == b"LIB-VER":
        connection.library_version = read_label(rest[1], "lib-ver")
    else:
        raise BadArgument(f"Unrecognized option '{printable(rest[0])}'")
    return "OK"


def _describe(connection: Connection) -> str:
    """One line of CLIENT LIST, in Redis' words."""
    now = time.monotonic()
    waiting = connection.queued_bytes
    return (
        f"id={connection.id} addr={connection.address} laddr={connection.local_address} "
        f"name={connection.name} age={int(now - connection.opened_at)} "
        f"idle={int(now - connection.last_command_at)} flags=N db=0 sub=0 psub=0 ssub=0 multi=-1 "
        f"qbuf=0 qbuf-free=0 argv-mem=0 obl=0 oll={int(waiting > 0)} omem={waiting} "
        f"tot-mem={waiting} events=r cmd={connection.last_command.lower()} user={connection.user} "
        f"redir=-1 resp={connection.protocol} lib-name={connection.library} "
        f"lib-ver={connection.library_version}"
    )
