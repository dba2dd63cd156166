"""A home router's UPnP (an Internet Gateway Device), as a process: `home_router.py LAN_ADDRESS WAN_ADDRESS [how]`.

It answers searches on its LAN, and forwards the TCP ports of its WAN address that it was asked to map, in user space.
Each request and each connection becomes a line of JSON on standard output. `how`: `permanent` (accepts only mappings
without an expiry), `taken` (another host has the first port that is requested), `held` (the same, but the last to ask
gets it), `refuses`, `closed` (maps but forwards nothing), `offline` (has no outside address), `carrier` (has an address
in its provider's own network), `drips` and `floods` (never end their first answer, which comes slowly, or as fast as
it can), `silent`.
"""

import asyncio
import json
import re
import socket
import struct
import sys
from contextlib import suppress
from typing import TypeAlias, cast

GROUP, PORT, HTTP_PORT = "239.255.255.250", 1900, 5000
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType><friendlyName>router</friendlyName><UDN>uuid:1</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><UDN>uuid:2</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN><serviceList>
<service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<SCPDURL>/scpd.xml</SCPDURL><controlURL>/control</controlURL><eventSubURL>/events</eventSubURL></service>
</serviceList></device></deviceList></device></deviceList></device></root>"""
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


def note(action: str, **fields: str) -> None:
    sys.stdout.write(json.dumps({"action": action, **fields}) + "\n")
    sys.stdout.flush()


class Search(asyncio.DatagramProtocol):
    """Answers searches for a gateway."""

    def __init__(self, lan: str) -> None:
        self._lan = lan

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if data.startswith(b"M-SEARCH"):
            lines = (
                "HTTP/1.1 200 OK",
                f"LOCATION: http://{self._lan}:{HTTP_PORT}/root.xml",
                f"ST: {DEVICE}",
                "USN: uuid:1",
            )
            self._transport.sendto("\r\n".join((*lines, "", "")).encode(), addr)


class Router:
    """The router: its mappings, and its answers to requests."""

    def __init__(self, lan: str, wan: str, how: str) -> None:
        self.lan, self.wan, self._how = lan, wan, how
        self._mapped: dict[int, asyncio.Server] = {}
        self._holders: dict[int, tuple[str, str]] = {5001: ("192.168.12.9", "5001")} if how == "held" else {}
        self._taken: int | None = None

    async def serve(self, reader: Reader, writer: Writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            status, body = 200, DESCRIPTION
        else:
            length = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
            action = re.search(r'soapaction: *"?[^#]*#(\w+)', head, re.IGNORECASE)
            assert length is not None
            assert action is not None
            sent = (await reader.readexactly(int(length[1]))).decode()
            fields = dict(re.findall(r"<(New\w+)>([^<]*)</New\w+>", sent))
            status, body = await self._answer(action[1], fields)
        if self._how == "drips":
            writer.write(b"HTTP/1.1 200 x\r\nContent-Length: 999999\r\n\r\n")
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.5)
        if self._how == "floods":
            writer.write(b"HTTP/1.1 200 x\r\n\r\n")
            while not writer.is_closing():
                writer.write(bytes(1 << 20))
                await writer.drain()
        writer.write(
            f"HTTP/1.1 {status} x\r\nContent-Type: text/xml\r\nContent-Length: {len(body)}\r\n"
            f"Connection: close\r\n\r\n{body}".encode()
        )
        await writer.drain()
        writer.close()

    async def _answer(self, action: str, fields: dict[str, str]) -> tuple[int, str]:
        if not action.startswith("Get"):
            note(action, **fields)
        code = await self._do(action, fields)
        if isinstance(code, int):
            fault = f"<errorCode>{code}</errorCode><errorDescription>no</errorDescription>"
            inner = f"<s:Fault><detail><UPnPError>{fault}</UPnPError></detail></s:Fault>"
        else:
            inner = f'<u:{action}Response xmlns:u="{SERVICE}">{code}</u:{action}Response>'
        envelope = 'xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        return (500 if isinstance(code, int) else 200), f"<s:Envelope {envelope}><s:Body>{inner}</s:Body></s:Envelope>"

    async def _do(self, action: str, fields: dict[str, str]) -> int | str:
        """The answer to a request; a number is an error code."""
        if action == "GetStatusInfo":
            return "<NewConnectionStatus>Connected</NewConnectionStatus><NewUptime>9</NewUptime>"
        if action == "GetExternalIPAddress":
            address = {"offline": "", "carrier": "100.64.0.7"}.get(self._how, self.wan)
            return f"<NewExternalIPAddress>{address}</NewExternalIPAddress>"
        port = int(fields["NewExternalPort"])
        if action == "GetSpecificPortMappingEntry":
            if port not in self._holders:
                return 714
            client, held = self._holders[port]
            return (
                f"<NewInternalPort>{held}</NewInternalPort><NewInternalClient>{client}</NewInternalClient>"
                "<NewEnabled>1</NewEnabled><NewPortMappingDescription>x</NewPortMappingDescription>"
                "<NewLeaseDuration>60</NewLeaseDuration>"
            )
        if action == "DeletePortMapping":
            self._holders.pop(port, None)
            if port in self._mapped:
                self._mapped.pop(port).close()
            return ""
        if self._how == "refuses":
            return 606
        if self._how == "permanent" and fields["NewLeaseDuration"] != "0":
            return 725
        if self._how == "taken":
            self._taken = port if self._taken is None else self._taken
            if port == self._taken:
                return 718
        self._holders[port] = fields["NewInternalClient"], fields["NewInternalPort"]
        if port not in self._mapped and self._how != "closed":
            inside = fields["NewInternalClient"], int(fields["NewInternalPort"])

            async def passed_on(reader: Reader, writer: Writer) -> None:
                note("connected")
                there = await asyncio.open_connection(*inside)
                await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

            self._mapped[port] = await asyncio.start_server(passed_on, self.wan, port)
        return ""


async def copy(reader: Reader, writer: Writer) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(lan: str, wan: str, how: str = "") -> None:
    heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    heard.bind((GROUP, PORT))
    heard.setsockopt(
        socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton(lan))
    )
    router = Router(lan, wan, how)
    await asyncio.start_server(router.serve, lan, HTTP_PORT)
    if how != "silent":
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: Search(lan), sock=heard)
    note("ready")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
