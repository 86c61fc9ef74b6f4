"""Reads an export through libnbd with simple replies: many short reads and a few long ones in flight at once, in random order.

Arguments: the export's URI, a file with the expected content, the seed, connections, and rounds for each. Prints what differs.
"""

import ctypes
import random
import sys

uri, expected, seed, connections, rounds = sys.argv[1:]
content = open(expected, "rb").read()
rand = random.Random(int(seed))
nbd = ctypes.CDLL("libnbd.so.0")
nbd.nbd_get_error.restype = ctypes.c_char_p


class Callback(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("callback", "user_data", "free")]


handle, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
nbd.nbd_create.restype = handle
for name, result, arguments in (
    ("close", None, []),
    ("set_request_structured_replies", ctypes.c_int, [ctypes.c_bool]),
    ("get_structured_replies_negotiated", ctypes.c_int, []),
    ("connect_uri", ctypes.c_int, [ctypes.c_char_p]),
    ("aio_pread", number, [ctypes.c_void_p, size, ctypes.c_uint64, Callback, ctypes.c_uint32]),
    ("aio_command_completed", ctypes.c_int, [number]),
    ("poll", ctypes.c_int, [ctypes.c_int]),
    ("shutdown", ctypes.c_int, [ctypes.c_uint32]),
):
    function = getattr(nbd, "nbd_" + name)
    function.restype, function.argtypes = result, [handle, *arguments]


def call(name, *arguments):
    result = getattr(nbd, "nbd_" + name)(*arguments)
    if result == -1:
        raise OSError(nbd.nbd_get_error().decode())
    return result


def read(client):
    """Returns the number of reads that differ."""
    lengths = [rand.choice((512, 4096, 8192)) for _ in range(12)] + [2 << 20, 4 << 20, 4096, 4096]
    rand.shuffle(lengths)
    reads = []
    for length in lengths:
        at = rand.randrange(0, len(content) - length) // 512 * 512
        buffer = ctypes.create_string_buffer(length)
        cookie = call("aio_pread", client, buffer, length, at, Callback(), 0)
        reads.append((cookie, buffer, at, length))
    for cookie, *_ in reads:
        while call("aio_command_completed", client, cookie) == 0:
            call("poll", client, -1)
    return sum(buffer.raw != content[at : at + length] for _, buffer, at, length in reads)


differ = 0
for _ in range(int(connections)):
    client = nbd.nbd_create()
    call("set_request_structured_replies", client, False)
    call("connect_uri", client, uri.encode())
    assert call("get_structured_replies_negotiated", client) == 0
    for _ in range(int(rounds)):
        differ += read(client)
    call("shutdown", client, 0)
    nbd.nbd_close(client)
print(differ)
