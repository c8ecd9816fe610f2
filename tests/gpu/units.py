"""Replaces systemd on a private bus: tells gpusessiond whether its unit restarts or stops.

The standard library has no D-Bus, so this has as much of its protocol as the daemon's questions
need.
"""

import os
import socket
import struct
import threading

NAME = "org.freedesktop.systemd1"
# Kinds of messages, and the header's fields: their numbers and types.
CALL, ANSWER = 1, 2
PATH, INTERFACE, MEMBER, ANSWERED, DESTINATION, SENDER, SIGNATURE = (1, "o"), (2, "s"), (3, "s"), (5, "u"), (6, "s"), (7, "s"), (8, "g")


def padded(data, size):
    """Fills data up to a multiple of a size."""
    return data + bytes(-len(data) % size)


def text(value):
    """Encodes a string or an object path."""
    return struct.pack("<I", len(value.encode())) + value.encode() + b"\0"


def texts(data):
    """Decodes strings that follow each other."""
    found, at = [], 0
    while at < len(data):
        size = struct.unpack_from("<I", data, at)[0]
        found.append(data[at + 4:at + 4 + size].decode())
        at += 4 + size + 1
        at += -at % 4
    return found


def value(kind, data, at):
    """Decodes a header field's value; returns it and the place behind it."""
    if kind == "u":
        return struct.unpack_from("<I", data, at)[0], at + 4
    size, begin = (data[at], at + 1) if kind == "g" else (struct.unpack_from("<I", data, at)[0], at + 4)
    return data[begin:begin + size].decode(), begin + size + 1


def encoded(kind, number, fields, body):
    """Encodes a message."""
    header = b""
    for (code, form), content in fields:
        header = padded(header, 8) + bytes((code, 1)) + form.encode() + b"\0"
        header += struct.pack("<I", content) if form == "u" else bytes((len(content),)) + content.encode() + b"\0" if form == "g" else text(content)
    return padded(struct.pack("<cBBBIII", b"l", kind, 0, 1, len(body), number, len(header)) + header, 8) + body


class Units:
    """Answers as systemd would while `job` is the job of the daemon's unit: "restart" or "stop"."""

    def __init__(self, bus):
        self.job, self.number = "stop", 0
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(bus))
        self.stream = self.socket.makefile("rb")
        self.socket.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        if not (said := self.stream.readline()).startswith(b"OK"):
            raise RuntimeError(f"the bus says: {said.decode(errors='replace').strip() or 'nothing'}")
        self.socket.sendall(b"BEGIN\r\n")
        self.ask("Hello", "", b"")
        self.ask("RequestName", "su", padded(text(NAME), 4) + struct.pack("<I", 0))
        threading.Thread(target=self.serve, daemon=True).start()

    def send(self, kind, fields, signature, body):
        """Sends a message."""
        self.number += 1
        self.socket.sendall(encoded(kind, self.number, fields + ([(SIGNATURE, signature)] if signature else []), body))

    def ask(self, member, signature, body):
        """Calls a method of the bus, and reads up to its answer."""
        bus = "org.freedesktop.DBus"
        self.send(CALL, [(PATH, "/org/freedesktop/DBus"), (INTERFACE, bus), (MEMBER, member), (DESTINATION, bus)], signature, body)
        while True:
            kind, _, fields, _ = self.receive()
            if fields.get(ANSWERED[0]) == self.number:
                if kind != ANSWER:
                    raise RuntimeError(f"the bus refuses {member}")
                return

    def receive(self):
        """Reads a message: its kind, number, header fields and body."""
        begin = self.stream.read(16)
        if len(begin) < 16:
            raise EOFError
        _, kind, _, _, size, number, header = struct.unpack("<cBBBIII", begin)
        data, fields, at = self.stream.read(header + -header % 8), {}, 0
        while at < header:
            at += -at % 8
            fields[data[at]], at = value(chr(data[at + 2]), data, at + 4)
        return kind, number, fields, self.stream.read(size)

    def serve(self):
        """Answers calls until the bus closes the connection."""
        try:
            while True:
                kind, number, fields, body = self.receive()
                if kind == CALL:
                    member = fields.get(MEMBER[0])
                    signature, answer = self.answer(texts(body)[-1] if member == "Get" else member)
                    self.send(ANSWER, [(ANSWERED, number), (DESTINATION, fields[SENDER[0]])], signature, answer)
        except (EOFError, OSError):
            pass

    def answer(self, word):
        """Returns an answer's type and body, by the name of the method or property."""
        if word == "GetUnitByPID":
            return "o", text("/unit")
        if word == "Job":
            return "v", padded(b"\4(uo)\0", 8) + struct.pack("<I", 1) + text("/job")
        return "v", padded(b"\1s\0", 4) + text(self.job)

    def close(self):
        """Leaves the bus."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
