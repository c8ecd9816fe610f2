"""A server's journal: each event has a message id, a client, a reason, and a catalog entry."""
import json
import time

ORDER = 25
GROUP = "users"

NEW = "gpusession run --new"
# A data connection from a library of another version.
STRANGER = "python3 -c \"import socket; s = socket.create_connection(('gpu1', 7602)); s.sendall(b'GPUSESS\\x01\\x03\\x00' + bytes(54)); s.recv(4)\""
# The client's command, and the event that the server logs: message id, subject and fields.
EVENTS = [
    (f"{NEW} -m 10% -- true", "a644770082934e8291254c1e8b4db1d8", "A lease of GPUs was granted", ("LEASE", "CLIENT", "SERVER")),
    (f"{NEW} -m 10% -- true", "b33b7a197cde42a497afb486369f74ce", "A lease of GPUs is over", ("LEASE", "CLIENT", "REASON")),
    (f"! {NEW} -m 100% -- true", "1b2f23ff354d44fb8b9cec6cfd471c07", "All GPUs are taken", ("CLIENT", "REASON")),
    # Three GPUs, in addition to the two of everyone's lease; the client may have four.
    (f"! {NEW} -n 2 -m 10% -- {NEW} -m 10% -- true", "5177d173d2ef49f288aba01572469454", "A limit refuses GPUs", ("CLIENT", "REASON")),
    (STRANGER, "8ea3d210ae18426688c40c4b756bf439", "Versions do not fit together", ("REASON",)),
]


def run(site, check):
    client, server = site.client, site.servers[0]
    for command, event, subject, fields in EVENTS:
        with check(subject):
            begin = server.ok("date +%s.%N")
            journal = f"journalctl -b -t gpuserver MESSAGE_ID={event} --since=@{begin} --no-pager"
            seen = ""
            # For events that a client can repeat at will, the server writes one line in 5 s.
            end = time.monotonic() + 30
            while time.monotonic() < end:
                client.ok(command)
                seen = server.run(f"{journal} -o json").out
                if seen:
                    break
            assert seen, f"not within 30 s: {command}"
            entry = json.loads(seen.splitlines()[-1])
            lacking = [name for name in fields if not entry.get(f"GPUSESSION_{name}")]
            assert not lacking, f"{lacking}: {entry}"
            assert entry.get("GPUSESSION_CLIENT", "client") == "client", entry
            assert f"Subject: {subject}" in server.ok(f"{journal} -x"), event
