"""A server on a GPU of its own process, for a test to kill: PATH HOLD [FOLDER of emulated GPUs]."""

import sys
import time
from pathlib import Path

from support.cases.transport_cases import exact_deltas, terms_of
from support.doubles.peer_double import CompiledGpus, RealGpus, Sockets

from serving.lora_server.transport import device_memory
from serving.lora_server.transport.serve import serve


def main() -> None:
    path, hold, folder = sys.argv[1:]
    gpus = CompiledGpus(Path(folder)) if folder else RealGpus()
    terms, seen = terms_of(ep=1), []

    def compute(request):
        seen.append(request)
        if len(seen) == int(hold):
            print("held", flush=True)
            time.sleep(3600)
        return exact_deltas(request, terms.shapes)

    server = device_memory.open_server(path, terms, 0, Sockets(gpus).gpus.device(1))
    print("listening", flush=True)
    serve(server, compute)


if __name__ == "__main__":
    main()
