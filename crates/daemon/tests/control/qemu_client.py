"""QEMU's own QMP client, led by a test: a line of JSON in, a line of JSON out.

Arguments: the socket. The first line out is the greeting. A line in is {"execute": ..., "arguments": ...}, answered by
{"return": ...} or {"class": ..., "desc": ...}; or {"wait": true}, answered by the next event.
"""

import asyncio
import json
import sys

from qemu.qmp import ExecuteError, QMPClient


def tell(value):
    print(json.dumps(value), flush=True)


async def answer(client, events, request):
    if "wait" in request:
        return dict(await events.get())
    try:
        return {"return": await client.execute(request["execute"], request["arguments"])}
    except ExecuteError as error:
        return {"class": error.error_class, "desc": str(error)}


async def main():
    client = QMPClient("test")
    await client.connect(sys.argv[1])
    tell(client.greeting._asdict())
    with client.listener() as events:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            tell(await answer(client, events, json.loads(line)))


asyncio.run(main())
