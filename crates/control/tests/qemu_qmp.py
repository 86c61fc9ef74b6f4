"""What QEMU's own client library finds at a control socket: a line of JSON for each step.

Arguments: the socket.
"""

import asyncio
import json
import sys

from qemu.qmp import ExecuteError, QMPClient


def tell(step, value):
    print(json.dumps([step, value], sort_keys=True), flush=True)


async def main():
    client = QMPClient("test")
    await client.connect(sys.argv[1])
    tell("capabilities", client.greeting.QMP.capabilities)

    version = await client.execute("query-version")
    tell("version", version["qemu"]["major"])

    await client.execute("blockdev-add", {
        "driver": "raw",
        "node-name": "vm1",
        "cache": {"direct": True},
        "file": {"driver": "file", "filename": "/vms/vm1.raw", "aio": "io_uring"},
    })
    await client.execute("block-export-add", {
        "type": "vhost-user-blk",
        "id": "e1",
        "node-name": "vm1",
        "writable": True,
        "addr": {"type": "unix", "path": "/run/vm1.sock"},
        "num-queues": 4,
    })
    tell("exports", await client.execute("query-block-exports"))

    with client.listener("BLOCK_EXPORT_DELETED") as events:
        await client.execute("block-export-del", {"id": "e1"})
        event = await events.get()
        tell("event", [event["event"], event["data"], sorted(event["timestamp"])])
    tell("exports", await client.execute("query-block-exports"))

    for command, arguments in [
        ("no-such-command", {}),
        ("blockdev-del", {}),
        ("blockdev-del", {"node-name": "nobody"}),
        ("x-ringdisk-detach", {"id": "nobody"}),
    ]:
        try:
            await client.execute(command, arguments)
            tell("error", None)
        except ExecuteError as error:
            tell("error", [error.error_class, str(error)])

    # Several commands at a time: the library tells the replies apart by their ids.
    many = [client.execute("query-named-block-nodes") for _ in range(50)]
    nodes = await asyncio.gather(*many)
    tell("nodes", [len(nodes), nodes[0][0]["node-name"], nodes[0][0]["cache"]["direct"]])

    commands = {command["name"] for command in await client.execute("query-commands")}
    schema = await client.execute("query-qmp-schema")
    described = {entity["name"] for entity in schema if entity["meta-type"] == "command"}
    tell("undescribed", sorted(commands ^ described))

    await client.execute("quit")
    await client.disconnect()
    tell("done", True)


asyncio.run(main())
