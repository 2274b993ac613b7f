"""The server of one command, whose LoRA Server and instances are a world of NVSHMEM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from support.processes.server_process import ROOT, free_port, post, wait_healthy


class WorldServer:
    """`count` instances and as many ranks; without a count one process with all adapters."""

    def __init__(
        self,
        files: tuple[str, Mapping[str, str]],
        log: Path,
        stack: ExitStack,
        flags: Sequence[str],
        env: Mapping[str, str],
        count: int = 0,
        *,
        waits: bool = True,
    ):
        """`files` are a model and its adapters; the server ends with the stack at the latest.

        It is healthy if the caller waits for that.
        """
        model, adapters = files
        self.log, self._count, port = log, count, free_port()
        self.status = 0  # with which it is to leave
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "serving.launch", model, "--port", str(port), *flags]
        if count:
            command += ["--instances", str(count), "--lora-server", str(count)]
            command += ["--lora-server-transport", "nvshmem", "--lora-server-wait-s", "30"]
        command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
        stack.callback(self.end)
        if waits:
            wait_healthy(self.url, self.process, log)

    def end(self) -> None:
        """End the server, which must leave as it should."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(120) == self.status, self.log.read_text()[-3000:]

    def answers(
        self, models: Sequence[str | None], prompts: Sequence[object], max_tokens: int
    ) -> list[str]:
        """Return greedy answers; None is the base model."""

        def ask(name: str | None, prompt: object) -> str:
            body = {"model": name or "model", "prompt": prompt, "temperature": 0}
            body |= {"max_tokens": max_tokens, "ignore_eos": True}
            return post(f"{self.url}/v1/completions", body)["choices"][0]["text"]

        return [ask(*one) for one in zip(models, prompts, strict=True)]

    def roles(self) -> list[int]:
        """Return the roles' processes by their order of start, whatever thread started them."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = sorted(int(child) for file in threads for child in file.read_text().split())
        return [pid for pid in children if "spawn_main" in _command(pid)]

    def lose(self, pid: int, number: signal.Signals, asked: tuple, want: list[str]) -> None:
        """Signal a role; return when all roles are other processes and answer `asked` as before.

        Answers other than `want` are an error, statuses other than 503 too.
        """
        before = set(self.roles())
        os.kill(pid, number)
        self.recovers(before, asked, want)

    def recovers(self, before: set[int], asked: tuple, want: list[str]) -> None:
        """Return as `lose` does, of roles whose processes were `before`."""
        end = time.monotonic() + 240
        while (
            before & set(self.roles())
            or len(self.roles()) < 2 * self._count
            or not self._answers(asked, want)
        ):
            assert time.monotonic() < end, self.log.read_text()[-5000:]
            time.sleep(0.2)

    def _answers(self, asked: tuple, want: list[str]) -> bool:
        try:
            got = self.answers(*asked)
        except OSError:
            return False
        except AssertionError as error:
            if str(error).startswith("503"):
                return False
            raise
        assert got == want
        return True


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
