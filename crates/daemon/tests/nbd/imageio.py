"""oVirt's NBD client: writes, reads back and prints the dirty extents of an export."""

import json
import sys

from ovirt_imageio._internal import nbd

socket, export = sys.argv[1:]
with nbd.Client(nbd.UnixAddress(socket), export, dirty=True) as client:
    client.write(1 << 20, b"\x05" * 4096)
    client.zero(2 << 20, 65536)
    client.flush()
    assert client.read(1 << 20, 4096) == b"\x05" * 4096
    assert client.read(2 << 20, 65536) == bytes(65536)
    extents = client.extents(0, client.export_size)
    at, dirty = 0, []
    for extent in extents[client.dirty_bitmap]:
        if extent.dirty:
            dirty.append([at, extent.length])
        at += extent.length
    assert at == client.export_size, at
    at = 0
    for extent in extents["base:allocation"]:
        at += extent.length
    assert at == client.export_size, at
    print(json.dumps(dirty))
